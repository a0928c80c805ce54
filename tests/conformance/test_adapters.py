"""Who knows one adapter knows all of them: the same verbs, signatures and documented faces."""

import inspect

import pytest

import lossscale_core
import lossscale_jax
import lossscale_tf
import lossscale_torch

ADAPTERS = [lossscale_torch, lossscale_jax, lossscale_tf]
VERBS = ["init_state", "scale", "all_finite", "unscale", "select"]
EACH = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda module: module.__name__)


def _positional(function):
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


@EACH
@pytest.mark.parametrize("verb", VERBS)
def test_the_verbs_have_one_signature(adapter, verb):
    """The core's, but for what is said by keyword."""
    assert _positional(getattr(adapter, verb)) == _positional(getattr(lossscale_core, verb))


@EACH
def test_the_face_lists_what_users_may_touch(adapter):
    """Sorted, complete and documented; a class is found where users import it."""
    public = {name for name in vars(adapter) if not name.startswith("_")}
    assert {*adapter.__all__, "overflow_report", *VERBS} == public
    assert sorted(adapter.__all__) == sorted(set(adapter.__all__))
    for name in adapter.__all__:
        assert getattr(adapter, name).__doc__, name
        if inspect.isclass(getattr(adapter, name)):
            assert getattr(adapter, name).__module__ in (adapter.__name__, "lossscale_core"), name
