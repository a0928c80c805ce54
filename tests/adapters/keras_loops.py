"""Steps and loops with Keras on the backend of this process, as a user of that backend writes them."""

import keras
import numpy as np
import pytest

from lossscale_core import DynamicScaling
from lossscale_keras import LossScaleOptimizer

BACKEND = keras.backend.backend()
WRAPPERS = [LossScaleOptimizer]
if BACKEND == "tensorflow":
    from lossscale_tf import LossScaleOptimizer as LossScaleOptimizerOfTensorFlow

    WRAPPERS.append(LossScaleOptimizerOfTensorFlow)
EACH_WRAPPER = pytest.mark.parametrize("wrapper", WRAPPERS)
"""Run a test with the wrapper of `lossscale_keras` and, on TensorFlow, also with the wrapper of `lossscale_tf`."""


class Two:
    """An optimizer around two weights at zero, and eager calls.

    The scale grows after each step, so that gradients divided by the scale of another step are wrong by a factor of
    two. It starts below 1, so that a rule with a minimum of 1 fails.
    """

    def __init__(self, wrapper=LossScaleOptimizer):
        self.weights = [keras.Variable(0.0), keras.Variable(0.0)]
        policy = DynamicScaling(init_scale=0.25, min_scale=0.25, growth_interval=1)
        self.optimizer = wrapper(keras.optimizers.SGD(1.0), policy)
        self.optimizer.build(self.weights)

    def scaled(self, gradient, by="scale_loss"):
        """Return the scaled gradient of a loss, and the loss, which is the gradient times a weight of 1."""
        loss = getattr(self.optimizer, by)(keras.ops.convert_to_tensor(float(gradient)))
        return [keras.ops.copy(loss)], loss

    def apply(self, grads, weight=0, loss=None):
        """Apply scaled gradients."""
        self.optimizer.apply(grads, self.weights[weight : weight + 1], loss=loss)

    def went(self, first, second=0.0):
        """Require that the weights moved by these amounts."""
        assert [float(value_of(weight)) for weight in self.weights] == [-first, -second]


def apply(optimizer, variables, grads):
    """Take a step: by `stateless_apply` under `jit` on JAX, in a graph on TensorFlow, eagerly on PyTorch."""
    grads = [keras.ops.convert_to_tensor(grad) for grad in grads]
    if not optimizer.built:
        optimizer.build(variables)
    if BACKEND == "jax":
        import jax

        jitted = vars(optimizer).setdefault("_jitted_by_test", jax.jit(optimizer.stateless_apply))
        values = [v.value for v in optimizer.variables], grads, [v.value for v in variables]
        after, state = jitted(*values)
        for variable, value in zip([*variables, *optimizer.variables], [*after, *state], strict=True):
            variable.assign(value)
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        graph = tf.function(lambda *grads: optimizer.apply(list(grads), variables), autograph=False)
        vars(optimizer).setdefault("_graph_by_test", graph)(*grads)
    else:
        optimizer.apply(grads, variables)


def apply_scaled(optimizer, variables, grads):
    """Take a step with these gradients times the loss scale."""
    scale = value_of(optimizer.dynamic_scale)
    with np.errstate(all="ignore"):
        apply(optimizer, variables, [(np.asarray(grad, np.float32) * scale).astype("float32") for grad in grads])


def value_of(variable):
    """Return the value of a variable as a NumPy array. `Variable.numpy` would cause a warning of NumPy."""
    value = keras.ops.convert_to_tensor(variable)
    return np.array(value.detach().numpy() if BACKEND == "torch" else np.asarray(value))


def values_of(*lists):
    """Return the values of variables as NumPy arrays."""
    return [value_of(variable) for variables in lists for variable in variables]


def assert_same(after, before):
    """Require that all arrays are equal, bit for bit."""
    for new, old in zip(after, before, strict=True):
        assert new.tobytes() == old.tobytes()
