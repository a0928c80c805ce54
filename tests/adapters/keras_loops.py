"""Steps and loops with Keras on the backend of this process, as a user of that backend writes them."""

import keras
import numpy as np
import pytest

from lossscale_keras import LossScaleOptimizer

BACKEND = keras.backend.backend()
WRAPPERS = [LossScaleOptimizer]
if BACKEND == "tensorflow":
    from lossscale_tf import LossScaleOptimizer as LossScaleOptimizerOfTensorFlow

    WRAPPERS.append(LossScaleOptimizerOfTensorFlow)
EACH_WRAPPER = pytest.mark.parametrize("wrapper", WRAPPERS)
"""Run a test with the wrapper of `lossscale_keras` and, on TensorFlow, also with the wrapper of `lossscale_tf`."""


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
