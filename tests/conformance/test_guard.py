"""The spike guard runs on every backend as on the host."""

import numpy as np
import pytest

from lossscale_core import GuardState, SpikeGuard
from tests.conformance.backends import BACKENDS

NORMS = np.exp(0.3 * np.random.default_rng(0).standard_normal(60)).astype(np.float32)
NORMS[20:24] *= 30
NORMS[[30, 35, 40, 45]] = np.nan, np.inf, 0.0, 3e38
NORMS[50:] *= 1e6
GUARD = SpikeGuard(memory=20, warmup=4)


def _on_host():
    state = GUARD.init_state()
    for norm in NORMS:
        accepted, state = GUARD.check(state, norm)
        yield accepted, state


@pytest.mark.parametrize(
    ("adapter", "way"),
    [(adapter, way) for adapter in BACKENDS for way in adapter.ways],
    ids=lambda part: getattr(part, "name", None),
)
def test_the_guard_checks_alike_on_every_backend(adapter, way):
    """Bit for bit eagerly, and to a few ulps in a compiler, which may round less often."""
    with adapter.context():
        xp = adapter.xp
        judge = way.transform(lambda state, norm: GUARD.check(state, norm, xp=xp))
        state = GuardState(*(adapter.asarray(value, value.dtype.name) for value in GUARD.init_state()))
        for norm, (expected, expected_state) in zip(NORMS, _on_host(), strict=True):
            accepted, after = judge(state, adapter.asarray(norm, "float32"))
            assert [adapter.dtype_of(value) for value in after] == ["float32"] * 3 + ["int32", "float32"]
            if not way.has_values:
                continue
            state = after
            assert bool(accepted) == bool(expected)
            numbers = [adapter.to_numpy(value) for value in state]
            if way.name == "eager":
                np.testing.assert_array_equal(numbers, expected_state)
            else:
                np.testing.assert_allclose(numbers, expected_state, rtol=1e-5)
