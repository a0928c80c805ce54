"""The blocks of the README run as they are pasted; the diff runs in the loop of a user."""

from pathlib import Path

import keras
import torch

from tests.adapters.pages import code_of

README = Path(__file__).parents[2] / "README.md"


def _run(heading, **names):
    """Run the first block below a heading, on a CPU; return the names that it makes."""
    exec(code_of("README.md", heading).replace('"cuda"', '"cpu"'), names)
    return names


def test_the_pytorch_lines_train():
    """The loop lowers the loss, and moves the schedule at each applied step alone."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    data = [(torch.eye(3), torch.ones(3, 1))] * 20
    loss_fn = torch.nn.functional.mse_loss
    names = _run(
        "PyTorch", torch=torch, model=model, optimizer=optimizer, scheduler=scheduler, loss_fn=loss_fn, data=data
    )
    assert scheduler.last_epoch == names["scaler"].metrics()["applied_steps"] > 10
    assert names["loss"].item() < 0.5


def test_one_policy_file_serves_every_framework(tmp_path, monkeypatch):
    """The file of the README makes the same policy in PyTorch, JAX, Keras and NumPy."""
    monkeypatch.chdir(tmp_path)
    toml = README.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    Path("policy.toml").write_text(toml, encoding="utf-8")
    names = _run("One policy for every framework")
    policy = names["scaler"].policy
    assert policy.growth_interval == 500
    assert names["optimizer"].policy == policy  # Keras's, the last one of that name
    assert f"policy={policy}" in repr(names["loss_scaled"](names["optax"].adam(1e-3), "policy.toml"))
    assert names["trace"].loss_scale_after.tolist() == [2.0**16, 2.0**15, 2.0**15]


def test_a_bad_bfloat16_step_is_skipped():
    """A NaN changes no parameter."""
    names = _run("bfloat16")
    before = names["model"].weight.clone()
    names["model"](torch.full((1, 4), torch.nan, dtype=torch.bfloat16)).sum().backward()
    names["optimizer"].step()
    assert torch.equal(names["model"].weight, before)


def test_the_jax_lines_train():
    """The parameters approach 1."""
    assert min(_run("JAX")["params"].tolist()) > 0.05


def test_the_keras_lines_train():
    """`fit` runs under `mixed_float16`, and counts its steps."""
    try:
        names = _run("Keras")
    finally:
        keras.config.set_dtype_policy("float32")
    assert int(names["model"].optimizer.metrics()["steps"]) == 1
