"""The first lines that a user copies, from the README, run as they stand."""

import re
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import torch

from tests.adapters.pages import after_diff

ROOT = Path(__file__).parents[2]


def _block(path, word):
    """Return the Python block of a page that holds a word; of a diff, what it ends in."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```(python|diff)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    (found,) = [(kind, block) for kind, block in blocks if word in block]
    return after_diff(found[1]) if found[0] == "diff" else textwrap.dedent(found[1])


def test_the_readmes_pytorch_lines_train():
    """The loop lowers the loss, and moves the schedule at each applied step alone."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    inputs = torch.eye(3)
    names = {
        **{"torch": torch, "model": model, "optimizer": optimizer, "scheduler": scheduler},
        **{"loss_fn": torch.nn.functional.mse_loss, "data": [(inputs, torch.ones(3, 1))] * 20},
    }
    exec(_block(ROOT / "README.md", "lossscale_torch").replace('"cuda"', '"cpu"'), names)
    assert scheduler.last_epoch == names["scaler"].metrics()["applied_steps"] > 10
    assert names["loss"].item() < 0.5


def test_the_readmes_jax_lines_train():
    """A step lowers the loss."""
    names = {"jax": jax, "optax": optax, "params": jnp.zeros(2), "loss_fn": lambda p, x: ((x @ p - 1.0) ** 2).mean()}
    exec(_block(ROOT / "README.md", "lossscale_jax"), names)
    params, _ = names["step"](names["params"], names["opt_state"], jnp.eye(2))
    assert names["loss_fn"](params, jnp.eye(2)) < 1.0


def test_the_readmes_keras_lines_train():
    """`fit` runs under `mixed_float16`, and counts its steps."""
    names = {
        "keras": keras,
        "build_model": lambda: keras.Sequential([keras.layers.Dense(1, dtype="float32")]),
        "inputs": np.eye(3, dtype="float32"),
        "targets": np.ones((3, 1), "float32"),
    }
    try:
        exec(_block(ROOT / "README.md", "lossscale_keras"), names)
    finally:
        keras.config.set_dtype_policy("float32")
    assert int(names["model"].optimizer.metrics()["steps"]) == 1
