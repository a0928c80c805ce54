"""The finite check is exact for every dtype and value, on one device and on eight."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lossscale_jax import all_finite, get_last_step, loss_scaled
from tests.jax_names import enable_x64
from tests.sweeping import IS_SWEEP

FLOAT8 = ["float8_e4m3fn", "float8_e3m4", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu"]
DTYPES = [*FLOAT8[:: 1 if IS_SWEEP else 2], "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
SHAPES = [(24, 40), (7,), (16, 8), (16, 8), (), (136, 144), (136, 144), (0, 8)]
ONE_DEVICE = """
from tests.adapters.test_jax_finite import require_exact_flags
for dtype in ("float16", "float32"):
    require_exact_flags(dtype, [(512, 512), (400, 400), (400, 400), (2**18 + 1,), (5,)])
"""


def require_exact_flags(dtype, shapes):
    """Plant values at random places, and compare each flag with NumPy's."""
    draw, number, flags = np.random.default_rng(0), jnp.finfo(jnp.dtype(dtype)), jax.jit(_flags)
    limit = float(np.finfo(np.float64 if number.bits == 64 else np.float32).max)
    ends = (float(number.max), -float(number.max)), (float(number.smallest_subnormal),)
    for plant in [(), (np.inf,), (-np.inf,), (np.inf, -np.inf), (np.nan,), (-np.nan,), *ends] * 2:
        leaves = [np.ones(shape, dtype) for shape in shapes]
        for value in plant:
            leaf = draw.choice([n for n, shape in enumerate(shapes) if np.prod(shape)])
            unit = 1j if np.iscomplexobj(leaves[leaf]) and draw.random() < 0.5 else 1
            leaves[leaf].flat[draw.integers(leaves[leaf].size)] = value * unit
        largest = np.max([np.abs(leaf.astype(complex)).max(initial=0.0) for leaf in leaves])
        finite = bool(np.isfinite(largest))
        assert all_finite(leaves) == finite
        for scale in (1.0, 2.0**-3, 2.0**10):
            results = [bool(flag) for flag in flags(leaves, jnp.float32(scale))]
            assert results == [not (finite and largest <= limit * scale)] + [finite] * 3


def _flags(leaves, scale):
    """Return whether a step overflows at a scale, and flags: of sharded leaves, and with a derivative."""
    optimizer = loss_scaled(optax.identity(), "dynamic")
    state = optimizer.init(leaves)
    state = state._replace(scale_state=state.scale_state._replace(loss_scale=scale))
    overflowed = get_last_step(optimizer.update(leaves, state)[1]).overflowed
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    specs = [(P("data"), P(None, "data"))[n % 2] if leaf.ndim == 2 else P() for n, leaf in enumerate(leaves)]
    places = [NamedSharding(mesh, spec) for spec in specs]
    sharded = [jax.lax.with_sharding_constraint(*pair) for pair in zip(leaves, places, strict=True)]
    times_flag = lambda x: x * all_finite([leaf * x.astype(leaf.dtype) for leaf in leaves])  # noqa: E731
    return overflowed, all_finite(sharded), *jax.value_and_grad(times_flag)(jnp.float32(1.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_flags_are_exact(dtype):
    """The check is right for infinities, NaN, and the largest and the smallest number, in leaves of all shapes."""
    with enable_x64():
        require_exact_flags(dtype, SHAPES)


def test_flags_are_exact_on_one_device():
    """The check is right on one device, where large leaves are combined or split."""
    flags = "--xla_force_host_platform_device_count=1"
    environment = os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": flags}
    subprocess.run([sys.executable, "-c", ONE_DEVICE], check=True, env=environment)
