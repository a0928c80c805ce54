"""The functions of every package: what the verbs make of odd leaves and wrong arguments, and what is public."""

import inspect

import numpy as np
import pytest

import lossscale_core
from tests.conformance.backends import BACKENDS
from tests.conformance.suite._checks import VERBS

ADAPTERS = {backend.verbs.__name__: backend for backend in reversed(BACKENDS) if backend.name != "host"}
EACH = pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
PACKAGES = [backend.verbs for backend in ADAPTERS.values() if backend.verbs is not lossscale_core]
EACH_PACKAGE = pytest.mark.parametrize("adapter", PACKAGES, ids=lambda module: module.__name__)
NAN, INF = float("nan"), float("inf")


@EACH
def test_a_python_number_is_a_leaf_like_any_other(adapter):
    """Next to arrays or alone; an integer is no gradient, and a loss all the same."""
    verbs, state = adapter.verbs, adapter.verbs.init_state(2.0**10)
    assert float(verbs.scale(1.0, state)) == float(verbs.scale({"loss": 1.0}, state)["loss"]) == 2.0**10
    assert float(verbs.unscale(1.0, state)) == 2.0**-10
    assert verbs.unscale([3, None], state) == [3, None]
    for finite in (1.0, 3, True, np.float64(1.0), [None, 1.0]):
        assert verbs.all_finite(finite)
    for bad in (INF, NAN, {"n": 1, "loss": -INF}):
        assert not verbs.all_finite(bad)
    assert float(verbs.select(adapter.asarray(np.False_, "bool"), 1.0, 2.0)) == 2.0


@EACH
def test_what_is_no_number_is_refused(adapter):
    """Text among the gradients is a mistake."""
    with pytest.raises(TypeError, match=r"'w'|str"):
        adapter.verbs.all_finite({"a": "w"})


@EACH_PACKAGE
def test_the_face_lists_what_users_may_touch(adapter):
    """Complete and documented; a class is found where users import it."""
    submodules = {name for name, value in vars(adapter).items() if inspect.ismodule(value)} - {*adapter.__all__}
    public = {name for name in vars(adapter) if not name.startswith("_") or name == "__version__"} - submodules
    assert {*adapter.__all__, "overflow_report", *VERBS} == public
    for name in adapter.__all__:
        assert getattr(adapter, name).__doc__, name
        if inspect.isclass(getattr(adapter, name)):
            homes = (adapter.__name__, "lossscale_keras", "lossscale_core", "lossscale_core.adapters")
            assert getattr(adapter, name).__module__ in homes, name


@EACH_PACKAGE
def test_one_import_is_enough(adapter):
    """The policies, the guard and the version are also found where the scaler is, and are the core's own."""
    for name in ("NoScaling", "FixedScaling", "DynamicScaling", "SpikeGuard", "__version__"):
        assert name in adapter.__all__
        assert getattr(adapter, name) is getattr(lossscale_core, name)
