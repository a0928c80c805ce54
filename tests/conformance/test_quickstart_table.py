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
(WRAP, _CLIP, _GUARD, _SCALE, SCALE_NOW, LAST_STEP, SKIPS, _LOG, SAVE, LOAD) = range(10)
POLICY = lossscale_core.DynamicScaling(init_scale=1024.0, min_scale=0.5)


class Column:
    """One column of the table, and the names that its cells see."""

    def __init__(self, place, **names):
        self.place = place
        self.names = {"policy": POLICY, **names}
        self.run(WRAP)

    def run(self, row):
        """Run a cell; return the value of its expression, or nothing for an assignment."""
        for code in ROWS[row][self.place]:
            if re.match(r"\w+ = ", code):
                exec(code, self.names)
            else:
                return eval(code, self.names)
        return None


class _PyTorch(Column):
    def __init__(self):
        self.parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        super().__init__(PYTORCH, **vars(lossscale_torch), optimizer=optimizer)

    def step(self, factor):
        self.parameter.grad = None
        self.names["loss"] = (self.parameter * factor).sum()
        self.run(_SCALE).backward()
        norm = self.run(_CLIP)
        self.names["scaler"].step(self.names["optimizer"])
        self.names["scaler"].update()
        return norm


class _JAX(Column):
    def __init__(self):
        names = vars(lossscale_core) | vars(lossscale_jax)
        super().__init__(JAX, **names, inner=optax.sgd(0.1))
        self.weights = jnp.ones(2)
        self.names["opt_state"] = self.names["optimizer"].init(self.weights)

    def step(self, factor):
        def scaled_loss(weights):
            self.names["loss"] = (weights * factor).sum()
            return self.run(_SCALE)

        opt_state, grads = self.names["opt_state"], jax.grad(scaled_loss)(self.weights)
        self.weights, opt_state = self.names["optimizer"].apply_gradients(grads, opt_state, self.weights)
        self.names |= {"opt_state": opt_state, "after": opt_state.scale_state}


class _Keras(Column):
    def __init__(self, package):
        super().__init__(KERAS, **vars(package))
        self.variable = keras.Variable(np.ones(2, np.float32))
        self.names["optimizer"].build([self.variable])

    def run(self, row):
        self.names["inner"] = keras.optimizers.SGD(0.1)  # one optimizer has one wrapper
        return super().run(row)

    def step(self, factor):
        self.names["loss"] = keras.ops.sum(self.variable * factor)
        self.run(_SCALE)
        grad = keras.ops.full((2,), factor) * self.names["optimizer"].dynamic_scale.value
        self.names["optimizer"].apply([grad], [self.variable])


COLUMNS = {
    "PyTorch": _PyTorch,
    "JAX": _JAX,
    "lossscale_keras": lambda: _Keras(lossscale_keras),
    "lossscale_tf": lambda: _Keras(lossscale_tf),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_tells_the_run(name):
    """After a finite step and two overflows: the scale, the last step, the skips, and a saved state that comes back."""
    column = COLUMNS[name]()
    for factor in (1.0, np.inf, np.inf):
        column.step(factor)
    assert float(column.run(SCALE_NOW)) == 256.0
    assert not bool(column.run(LAST_STEP).applied)
    assert int(column.run(SKIPS)) == 2
    column.run(SAVE)
    assert lossscale_core.state_from_dict(column.names["saved"], POLICY).loss_scale == 256.0
    column.step(np.inf)
    column.run(LOAD)
    assert float(column.run(SCALE_NOW)) == 256.0


@pytest.mark.parametrize("name", COLUMNS)
def test_the_other_cells_run(name):
    """What clips, skips spikes and logs is made with these words."""
    column = COLUMNS[name]()
    column.step(1.0)
    for row in (_GUARD, _LOG) if name == "PyTorch" else (_CLIP, _GUARD, _LOG):
        column.run(row)
