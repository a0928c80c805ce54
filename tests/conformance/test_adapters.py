"""All adapters have the same documented functions with the same parameters; `test_backends` compares the results."""

import inspect

import pytest

import lossscale_core
from lossscale_core.adapters import OverflowReport
from tests.conformance.backends import BACKENDS

ADAPTERS = sorted({backend.verbs for backend in BACKENDS} - {lossscale_core}, key=lambda module: module.__name__)
VERBS = ["init_state", "scale", "all_finite", "unscale", "select"]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda module: module.__name__)
def test_the_face_lists_what_users_may_touch(adapter):
    """Sorted, complete and documented; a class is found where users import it."""
    submodules = {name for name, value in vars(adapter).items() if inspect.ismodule(value)} - {*adapter.__all__}
    public = {name for name in vars(adapter) if not name.startswith("_")} - submodules
    assert {*adapter.__all__, "overflow_report", *VERBS} == public
    assert sorted(adapter.__all__) == sorted(set(adapter.__all__))
    for name in adapter.__all__:
        assert getattr(adapter, name).__doc__, name
        if inspect.isclass(getattr(adapter, name)):
            homes = (adapter.__name__, "lossscale_keras", "lossscale_core", "lossscale_core.adapters")
            assert getattr(adapter, name).__module__ in homes, name


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda module: module.__name__)
def test_one_import_is_enough(adapter):
    """The policies and the guard are also found where the scaler is, and are the core's own."""
    for name in ("NoScaling", "FixedScaling", "DynamicScaling", "SpikeGuard"):
        assert name in adapter.__all__
        assert getattr(adapter, name) is getattr(lossscale_core, name)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda module: module.__name__)
def test_overflow_report_has_the_same_parameters(adapter):
    """It takes gradients in the form of the framework, and the loss by its name."""
    signature = inspect.signature(adapter.overflow_report)
    assert signature.return_annotation is OverflowReport
    gradients, loss = signature.parameters.values()
    assert gradients.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert (loss.name, loss.kind, loss.default) == ("loss", inspect.Parameter.KEYWORD_ONLY, None)
