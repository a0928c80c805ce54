"""Every backend and every way it runs, described for the conformance suite as in a third-party package."""

import contextlib

import jax
import jax.numpy as jnp
import keras
import tensorflow as tf
import torch

import lossscale_core
import lossscale_jax
import lossscale_keras
import lossscale_tf
import lossscale_torch
from tests.conformance.core_backends import ALL_DTYPES, CORE, on_numpy
from tests.conformance.suite import Adapter, Way
from tests.jax_names import enable_x64


def _tensor(values, dtype):
    return torch.tensor(values).to(getattr(torch, dtype))


def _from_torch(tensor):
    return tensor.double().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def _compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", fullgraph=True)


def _on_meta(function):
    """Run with shapes and no values: an operation that needs one raises."""
    return lambda *trees: function(*torch.utils._pytree.tree_map_only(torch.Tensor, _without_values, trees))


def _without_values(tensor):
    return tensor.to("meta")


@contextlib.contextmanager
def _default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def torch_adapter(name="torch", **settings):
    """Return torch's adapter with eager, compiled and meta tensors."""
    ways = (Way("eager"), Way("compile", _compiled), Way("meta", _on_meta, has_values=False))
    described = {"verbs": lossscale_torch, "dtypes": ALL_DTYPES, "xp": torch, "ways": ways}
    return Adapter(name=name, asarray=_tensor, to_numpy=_from_torch, **{**described, **settings})


def _in_scan(function):
    """Run in the body of a scan of one step."""
    return lambda *trees: jax.lax.scan(lambda carry, _: (carry, function(*trees)), 0, None, length=1)[1]


def _first(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _scan(step, state, flags):
    _, states = jax.lax.scan(lambda state, flag: (step(state, flag),) * 2, state, jnp.stack(flags))
    yield from (state._make(row) for row in zip(*states, strict=True))


def _among_three(function):
    """Run the middle one of three at once; its neighbours' arrays are zeros, and their flags False."""
    batched = jax.jit(jax.vmap(function))

    def run(*trees):
        stacked = jax.tree.map(lambda leaf: jnp.stack([jnp.zeros_like(leaf), leaf, jnp.zeros_like(leaf)]), trees)
        if not jax.tree.leaves(stacked):  # vmap has nothing to go by
            return function(*trees)
        return jax.tree.map(lambda leaf: leaf[1], batched(*stacked))

    return run


JAX_WAYS = (
    Way("eager"),
    Way("jit", jax.jit),
    Way("scan", lambda function: jax.jit(lambda *trees: _first(_in_scan(function)(*trees))), iterate=_scan),
    Way("vmap", _among_three),
)


def _jax_array(values, dtype):
    return jnp.asarray(on_numpy(values, dtype))


def jax_adapter(name="jax", **settings):
    """Return JAX's adapter under every transform."""
    described = {
        "verbs": lossscale_jax,
        "dtypes": ("float16", "bfloat16", "float32", "complex64"),
        "xp": jnp,
        "ways": JAX_WAYS,
    }
    return Adapter(name=name, asarray=_jax_array, **{**described, **settings})


def _graph(**options):
    """Return a function that makes graphs; with autograph=False they raise where Python asks for a value."""
    return lambda function: tf.function(function, autograph=False, **options)


def _from_tensorflow(tensor):
    return (tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor).numpy()


def tf_adapter(name="tensorflow", **settings):
    """Return TensorFlow's adapter, eagerly, in a graph and under XLA."""
    ways = (Way("eager"), Way("graph", _graph()), Way("xla", _graph(jit_compile=True)))
    described = {"verbs": lossscale_tf, "dtypes": ALL_DTYPES, "xp": tf, "ways": ways}
    return Adapter(name=name, asarray=tf.constant, to_numpy=_from_tensorflow, **{**described, **settings})


def _on_keras_meta(function):
    """Run with shapes and no values, on the device that Keras itself calls so."""

    def run(*trees):
        with keras.device("meta"):
            return _on_meta(function)(*trees)

    return run


def keras_adapter():
    """Return the adapter of Keras on the backend of this process, eagerly and in one way that reads no value."""
    described = {"name": f"keras on {keras.backend.backend()}", "verbs": lossscale_keras}
    dtypes = ("float16", "bfloat16", "float32")
    if keras.backend.backend() == "jax":
        return jax_adapter(**described, dtypes=dtypes, ways=(Way("eager"), Way("jit", jax.jit)))
    dtypes += ("float64",)
    if keras.backend.backend() == "torch":
        ways = (Way("eager"), Way("meta", _on_keras_meta, has_values=False))
        return torch_adapter(**described, dtypes=dtypes, ways=ways)
    return tf_adapter(**described, dtypes=dtypes, ways=(Way("eager"), Way("xla", _graph(jit_compile=True))))


EAGERLY = (Way("eager"),)
BACKENDS = [
    *CORE,
    Adapter(
        name="core on torch",
        verbs=lossscale_core,
        asarray=_tensor,
        to_numpy=lambda array: _from_torch(torch.as_tensor(array)),  # of nothing, the flag is NumPy's
        placement={"xp": torch},
    ),
    jax_adapter("core on jax", verbs=lossscale_core, xp=None, placement={"xp": jnp}, ways=EAGERLY),
    torch_adapter(),
    torch_adapter("torch, default float16", ways=EAGERLY, context=lambda: _default_dtype(torch.float16)),
    torch_adapter("torch, default float64", ways=EAGERLY, context=lambda: _default_dtype(torch.float64)),
    jax_adapter(),
    jax_adapter(
        "jax with x64",
        dtypes=("float64", "complex128"),
        ways=(Way("eager"), Way("jit", jax.jit)),
        context=lambda: enable_x64(True),
    ),
    tf_adapter(),
    keras_adapter(),
]
