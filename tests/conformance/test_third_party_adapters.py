"""The suite checks adapters of other packages, and finds functions that wait for a device."""

import types

import pytest

import lossscale_jax
import lossscale_tf
import lossscale_torch
from tests.conformance import suite as conformance
from tests.conformance.backends import jax_adapter, tf_adapter, torch_adapter
from tests.conformance.suite._checks import VERBS

BLIND = [
    (lossscale_torch, torch_adapter, {"compile", "meta"}),
    (lossscale_jax, jax_adapter, {"jit", "scan", "vmap"}),
    (lossscale_tf, tf_adapter, {"graph", "xla"}),
]


@pytest.mark.parametrize(("package", "make", "blind"), BLIND)
def test_waiting_for_a_value_is_found(package, make, blind):
    """A verb that reads a value is right eagerly, and breaks its rule in each way that traces it or has no values."""
    verbs = types.SimpleNamespace(**{name: getattr(package, name) for name in VERBS})
    verbs.select = lambda grads_finite, new, old: package.select(bool(grads_finite), new, old)
    broken = set()
    for check in conformance.checks(make(verbs=verbs, dtypes=("float32",)), scenarios={}):
        if check.rule == "selection_is_atomic":
            try:
                check()
            except AssertionError:
                broken.add(check.case.partition(",")[0])
    assert broken == blind
