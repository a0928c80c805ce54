"""The table of the quickstart: each cell runs, and the three columns agree about the same run."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import torch

import lossscale_core
import lossscale_jax
import lossscale_keras
import lossscale_tf
import lossscale_torch

PAGE = (Path(__file__).parents[2] / "docs/quickstart.md").read_text(encoding="utf-8")
ROWS = [
    [re.findall(r"`([^`]+)`", cell) for cell in row.split(" | ")]
    for row in re.findall(r"^\| .+ \|$", PAGE.partition("## The same thing in each framework")[2], re.MULTILINE)[1:]
]
PYTORCH, JAX, KERAS = 1, 2, 3
(WRAP, CLIP, GUARD, SCALE, SCALE_NOW, LAST_STEP, SKIPS, LOG, SAVE, LOAD) = range(10)
POLICY = lossscale_core.DynamicScaling(init_scale=1024.0, min_scale=0.5)


class Column:
    """One column of the table, and the names that its cells see."""

    def __init__(self, place, **names):
        self.place, self.names = place, {"policy": POLICY, **names}
        self.run(WRAP)

    def run(self, row):
        """Run a cell; return the value of its expression, or nothing for an assignment."""
        for code in ROWS[row][self.place]:
            if re.match(r"\w+ = ", code):
                exec(code, self.names)
            else:
                return eval(code, self.names)
        return None


def _pytorch():
    parameter = torch.nn.Parameter(torch.ones(2))
    column = Column(PYTORCH, **vars(lossscale_torch), optimizer=torch.optim.SGD([parameter], lr=0.1))

    def step(factor):
        parameter.grad = None
        column.names["loss"] = (parameter * factor).sum()
        column.run(SCALE).backward()
        column.run(CLIP)
        column.names["scaler"].step(column.names["optimizer"])
        column.names["scaler"].update()

    return column, step


def _jax():
    column = Column(JAX, **vars(lossscale_core) | vars(lossscale_jax), inner=optax.sgd(0.1))
    weights, names = jnp.ones(2), column.names
    names["opt_state"] = names["optimizer"].init(weights)

    def scaled_loss(weights, factor):
        names["loss"] = (weights * factor).sum()
        return column.run(SCALE)

    def step(factor):
        grads = jax.grad(scaled_loss)(weights, factor)
        _, names["opt_state"] = names["optimizer"].apply_gradients(grads, names["opt_state"], weights)
        names["after"] = names["opt_state"].scale_state

    return column, step


def _keras(package):
    column, variable = Column(KERAS, **vars(package), inner=keras.optimizers.SGD(0.1)), keras.Variable(np.ones(2))
    optimizer = column.names["optimizer"]
    optimizer.build([variable])

    def step(factor):
        column.names["inner"] = keras.optimizers.SGD(0.1)  # one optimizer has one wrapper
        column.names["loss"] = keras.ops.sum(variable * factor)
        column.run(SCALE)
        optimizer.apply([keras.ops.full((2,), factor) * optimizer.dynamic_scale.value], [variable])

    return column, step


COLUMNS = {
    "PyTorch": _pytorch,
    "JAX": _jax,
    "lossscale_keras": lambda: _keras(lossscale_keras),
    "lossscale_tf": lambda: _keras(lossscale_tf),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_tells_the_run(name):
    """The cells of a column show the scale, the last step and the skips of a run, and save and load its state."""
    column, step = COLUMNS[name]()
    for factor in (1.0, np.inf, np.inf):
        step(factor)
    assert float(column.run(SCALE_NOW)) == 256.0
    assert not bool(column.run(LAST_STEP).applied)
    assert int(column.run(SKIPS)) == 2
    column.run(SAVE)
    assert lossscale_core.state_from_dict(column.names["saved"], POLICY).loss_scale == 256.0
    step(np.inf)
    column.run(LOAD)
    assert float(column.run(SCALE_NOW)) == 256.0
    for row in (GUARD, LOG) if name == "PyTorch" else (CLIP, GUARD, LOG):
        step(1.0)
        column.run(row)
