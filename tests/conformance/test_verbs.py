"""The functions of every package: what the verbs make of odd leaves and wrong arguments, and what is public."""

import inspect

import numpy as np
import pytest

import lossscale_core
from lossscale_core.errors import PolicyError
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


@EACH
def test_arguments_in_the_wrong_place_are_named(adapter):
    """The message says what was given, the rule, and how the call goes; a flag is one bool, and nothing else."""
    verbs, state = adapter.verbs, adapter.verbs.init_state("dynamic")
    loss, grads = adapter.asarray(np.float64(1.0), "float32"), {"w": adapter.asarray(np.ones(2), "float32")}
    flag, flags = adapter.asarray(np.True_, "bool"), adapter.asarray(np.array([True, False]), "bool")
    no_state = r"state=.* is not a state, since it has no loss_scale; "
    no_flag = r"grads_finite=.* must be a bool of shape \(\); call select\(grads_finite, new, old\)"
    for call, message in {
        lambda: verbs.scale(state, loss): rf"{no_state}call scale\(loss, state\)",
        lambda: verbs.scale(loss, 2.0): f"state=2.0 {no_state[9:]}",
        lambda: verbs.unscale(state, grads): rf"{no_state}call unscale\(grads, state\)",
        lambda: verbs.select(grads, grads, flag): no_flag,
        lambda: verbs.select(flags, grads, grads): no_flag,
        lambda: verbs.select(adapter.asarray(np.float64(NAN), "float32"), grads, grads): no_flag,
        lambda: verbs.select(NAN, grads, grads): no_flag,
        lambda: verbs.select(1, grads, grads): no_flag,
    }.items():
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(PolicyError, match="'cuda' is not a loss-scaling policy; pass a policy such as"):
        verbs.init_state("cuda")


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
