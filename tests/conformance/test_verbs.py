"""The functions of every package: what the verbs make of Python numbers, and what one import has."""

import inspect

import numpy as np
import pytest

import lossscale_core
from tests.conformance.backends import BACKENDS
from tests.conformance.suite._checks import VERBS

ADAPTERS = {backend.verbs.__name__: backend for backend in reversed(BACKENDS) if backend.name != "host"}


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_python_numbers_are_leaves(adapter):
    """Next to arrays or alone; an integer is a loss and no gradient, and text is neither."""
    verbs, state = adapter.verbs, adapter.verbs.init_state(2.0**10)
    assert float(verbs.scale(1.0, state)) == float(verbs.scale({"loss": 1.0}, state)["loss"]) == 2.0**10
    assert float(verbs.unscale(1.0, state)) == 2.0**-10
    assert verbs.unscale([3, None], state) == [3, None]
    for finite in (1.0, 3, True, np.float64(1.0), [None, 1.0]):
        assert verbs.all_finite(finite)
    for bad in (float("nan"), {"n": 1, "loss": -float("inf")}):
        assert not verbs.all_finite(bad)
    assert float(verbs.select(adapter.asarray(np.False_, "bool"), 1.0, 2.0)) == 2.0
    with pytest.raises(TypeError, match=r"'w'|str"):
        verbs.all_finite({"a": "w"})


@pytest.mark.parametrize("package", sorted(ADAPTERS.keys() - {"lossscale_core"}))
def test_one_import_is_enough(package):
    """An adapter has the core's own policies, guard and version, so that one import is enough."""
    verbs = ADAPTERS[package].verbs
    public = {name for name, value in vars(verbs).items() if name[0] != "_" and not inspect.ismodule(value)}
    # `__all__` lists each public name except some verbs and modules.
    assert public <= {*verbs.__all__, "overflow_report", *VERBS}
    for name in ("NoScaling", "FixedScaling", "DynamicScaling", "SpikeGuard", "__version__"):
        assert name in verbs.__all__
        assert getattr(verbs, name) is getattr(lossscale_core, name)
