"""The recipes of docs/logging.md, run unchanged with the real loggers; then their files are read."""

import csv
import functools
import re
from pathlib import Path

import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lossscale_core import DynamicScaling
from lossscale_core.testing import simulate
from lossscale_jax import loss_scaled
from lossscale_tf import LossScaleOptimizer
from lossscale_torch import GradScaler
from tests.adapters.jax_reading import reads_refused

pytestmark = pytest.mark.filterwarnings("default")  # what these packages warn of is theirs
PAGE = (Path(__file__).parents[2] / "docs/logging.md").read_text(encoding="utf-8")
POLICY = DynamicScaling(init_scale=2.0**10, growth_interval=9)
STEPS = 40
OVERFLOWS = {10, 19, 30}
RAN = simulate(POLICY, [step not in OVERFLOWS for step in range(STEPS)])
NAMES = ["loss_scale", "applied", "overflow_share", "grad_norm"]


def _run_recipe(heading, names):
    """Run the first program below a heading of the page, with these names, and add its own names."""
    program = re.search(rf"^##+ {heading}\n.*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]
    exec(program, names)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    """Keep what the loggers write in a folder of the test."""
    monkeypatch.chdir(tmp_path)


def _batches():
    """Yield batches of ones, and in some steps of numbers that are infinite in float16."""
    for step in range(STEPS):
        x = np.full((4, 3), 1e5 if step in OVERFLOWS else 1.0, np.float32)
        yield x, np.ones((4, 1), np.float32)


def _with_torch(log, fused=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-6, fused=fused),
        "scaler": GradScaler("cpu", policy=POLICY),
        "loss_fn": lambda prediction, y: torch.nn.functional.mse_loss(prediction.float(), y),
        "batches": [tuple(map(torch.from_numpy, batch)) for batch in _batches()],
        "log": log,
    }
    _run_recipe("PyTorch", names)


def _with_jax(log):
    def loss_fn(weight, x, y):
        return jnp.mean(((x.astype(jnp.float16) @ weight.astype(jnp.float16)).astype(jnp.float32) - y) ** 2)

    optimizer = loss_scaled(optax.sgd(1e-6), POLICY, max_norm=1.0)
    params = jnp.full((3, 1), 0.1)
    names = {
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "params": params,
        "opt_state": optimizer.init(params),
        "batches": [tuple(map(jnp.asarray, batch)) for batch in _batches()],
        "log": log,
    }
    _run_recipe("JAX", names)


def _with_keras(log):
    names = {"log": log}
    _run_recipe("Keras", names)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,), dtype="float32")
    outputs = keras.layers.Dense(1, dtype="mixed_float16")(inputs)
    model = names["LoggedModel"](inputs, keras.layers.Activation("linear", dtype="float32")(outputs))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1e-6), POLICY)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False, steps_per_execution=10)
    x, y = map(np.concatenate, zip(*_batches(), strict=True))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[names["ScaleLog"]()])


def _read_events(folder="runs"):
    events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    return {name: {each.step: each.value for each in events.Scalars(name)} for name in NAMES}


def _read_csv():
    with open("log.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {name: {int(row["step"]): float(row[name]) for row in rows} for name in NAMES}


LOGGERS = {
    "TensorBoard": (lambda names: names["writer"].close(), _read_events),
    "A CSV file": (lambda names: names["file"].close(), _read_csv),
}
"""How to end what each logger began, and how to read what it wrote."""


def _require_the_policys(written, numbers, steps):
    """Compare what was written under these numbers with what the policy says of these steps of the run."""
    assert [list(written[name]) for name in NAMES] == [numbers] * len(NAMES)
    share = np.cumsum(RAN.skipped) / np.arange(1, STEPS + 1)
    assert list(written["loss_scale"].values()) == list(RAN.loss_scale_used[steps])
    assert list(written["applied"].values()) == list(~RAN.skipped[steps])
    assert list(written["overflow_share"].values()) == pytest.approx(list(share[steps]))
    norms = np.array(list(written["grad_norm"].values()))
    assert list(np.isfinite(norms)) == list(~RAN.skipped[steps])
    norms = norms[~RAN.skipped[steps]]
    np.testing.assert_allclose(norms, norms[0], rtol=1e-2)  # unscaled: the scale changes, the batch does not


class _Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x).float(), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


LOOPS = {
    "torch": (_with_torch, "A CSV file"),
    "torch, TensorBoard": (_with_torch, "TensorBoard"),
    "torch, fused": (functools.partial(_with_torch, fused=True), "A CSV file"),
    "jax": (_with_jax, "A CSV file"),
    "keras": (_with_keras, "A CSV file"),
}


@pytest.mark.parametrize(("run", "logger"), LOOPS.values(), ids=LOOPS)
def test_a_logger_has_the_policys_numbers(run, logger):
    """The numbers of every tenth step are in the logger's own files."""
    names = {}
    _run_recipe(logger, names)
    run(names["log"])
    close, read = LOGGERS[logger]
    close(names)
    first = 10 if run is _with_keras else 0  # its recipe counts from 1
    steps = list(range(first, first + STEPS, 10))
    _require_the_policys(read(), steps, [step - bool(first) for step in steps])


def test_only_the_logger_waits():
    """The loop for JAX reads no array on the host."""
    with reads_refused():
        _with_jax(lambda step, numbers: None)


def test_weights_and_biases_accepts_the_numbers(monkeypatch):
    """Its recipe runs in the loop; nothing is sent or written."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    names = {}
    _run_recipe("Weights & Biases", names)
    _with_torch(names["log"])
    assert names["run"].disabled


def test_lightning_logs_the_policys_numbers():
    """Its own logger writes the four numbers every tenth step."""
    names = {"Module": _Module}
    _run_recipe("Lightning", names)
    torch.manual_seed(0)
    module = names["LoggedModule"]()
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, log_every_n_steps=10,
        plugins=[MixedPrecision("16-mixed", "cpu", GradScaler("cpu", policy=POLICY))],
        logger=TensorBoardLogger(".", name="runs", version=""), enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(list(_batches()), batch_size=None))
    written = _read_events()
    _require_the_policys(written, [9, 19, 29, 39], [9, 19, 29, 39])
