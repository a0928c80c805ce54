"""The public conformance suite, without any framework: what it lets pass, and what it catches."""

import types

import numpy as np
import pytest

import lossscale_core as core
from lossscale_core.adapters import tree
from tests.conformance import suite as conformance
from tests.conformance.core_backends import CORE, HOST, NUMPY
from tests.conformance.suite import Adapter
from tests.conformance.suite._checks import VERBS


def _with(**wrong):
    """Return NumPy's adapter with some verbs replaced by wrong ones."""
    verbs = {name: getattr(core, name) for name in VERBS}
    return Adapter(
        name="mine",
        verbs=types.SimpleNamespace(**{**verbs, **wrong}),
        asarray=NUMPY.asarray,
        dtypes=HOST.dtypes,
        placement={"xp": np},
    )


# array-api-strict computes with NumPy, which warns when a large growth_factor makes an infinite product.
@pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize("adapter", CORE, ids=str)
def test_the_cores_verbs_conform(adapter):
    """The core's verbs pass the suite on host scalars, NumPy arrays and a strict array namespace."""
    conformance.check(adapter)


def _overlooks_the_last(grads):
    return core.all_finite(tree.map_leaves(lambda leaf: leaf if leaf is None else leaf.reshape(-1)[:-1], grads))


def _keeps_halves(grads, state):
    return tree.map_leaves(lambda leaf: leaf if leaf is None else core.unscale(leaf, state).astype(leaf.dtype), grads)


WRONG = {
    "overlooks the last": ({"all_finite": _overlooks_the_last}, r"every_position_is_seen \(eager, float16\).* is True"),
    "keeps halves": ({"unscale": _keeps_halves}, "bfloat16 gradient, unscaled, is bfloat16, but must be float32"),
    "another order": ({"unscale": lambda state, grads: 0}, r"takes \(state, grads\), but must take \(grads, state\)"),
    "one more parameter": ({"all_finite": lambda grads, *, axis: np.True_}, "also takes axis; make them keyword-only"),
    "a verb is missing": ({"select": None}, "select is missing; the five verbs are"),
}


@pytest.mark.parametrize(("wrong", "words"), WRONG.values(), ids=WRONG)
def test_wrong_adapters_are_caught(wrong, words):
    """The suite names the rule that a wrong adapter breaks, how the check ran, and the value."""
    with pytest.raises(AssertionError, match=words):
        conformance.check(_with(**wrong))
