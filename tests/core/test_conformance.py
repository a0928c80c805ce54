"""The public conformance suite, without any framework: what it lets pass, and what it catches."""

import types

import numpy as np
import pytest

import lossscale_core as core
from lossscale_core import DynamicScaling
from lossscale_core.adapters import tree
from lossscale_core.testing import simulate
from tests.conformance import suite as conformance
from tests.conformance.core_backends import CORE, HOST, NUMPY
from tests.conformance.suite import Adapter, Scenario

VERBS = ("init_state", "scale", "all_finite", "unscale", "select")


def _with(**wrong):
    """Return NumPy's adapter with some verbs replaced by wrong ones."""
    verbs = {name: getattr(core, name) for name in VERBS}
    return Adapter(
        name="mine",
        verbs=types.SimpleNamespace(**{**verbs, **wrong}),
        asarray=NUMPY.asarray,
        dtypes=HOST.dtypes,
        placement={} if "init_state" in wrong else {"xp": np},
    )


def _each(function):
    def verb(grads, state):
        return tree.map_leaves(lambda leaf: None if leaf is None else function(leaf, state), grads)

    return verb


@pytest.mark.parametrize("adapter", CORE, ids=str)
def test_the_cores_own_verbs_conform(adapter):
    """On host scalars, NumPy and a strict namespace."""
    conformance.check(adapter)


def _shaped(grads):
    return np.reshape(core.all_finite(grads), (1,))


def _of_leaves(count):
    return lambda grads: core.all_finite(list(tree.leaves(grads))[:count])


def _keeps_halves(leaf, state):
    return core.unscale(leaf, state).astype(leaf.dtype)


def _overlooks_the_last(grads):
    return core.all_finite(tree.map_leaves(lambda leaf: leaf if leaf is None else leaf.reshape(-1)[:-1], grads))


def _nothing_is_an_overflow(grads):
    return core.all_finite(grads) & np.bool_(any(True for _ in tree.leaves(grads)))


@np.errstate(all="ignore")
def _scale_cast_down(leaf, state):
    narrow = leaf.dtype if leaf.dtype.kind != "i" else np.float32
    return (leaf * state.loss_scale.astype(narrow)).astype(core.scale(leaf, state).dtype)


@np.errstate(all="ignore")
def _in_place(leaf, state):
    if leaf.dtype not in (np.float32, np.float64):
        return core.unscale(leaf, state)
    leaf *= np.float32(1.0) / state.loss_scale
    return leaf


def _zeros_for_none(grads, state):
    return tree.map_leaves(lambda leaf: np.zeros(()) if leaf is None else core.unscale(leaf, state), grads)


def _leaf_by_leaf(grads_finite, new, old):
    """Skip only what overflowed itself."""
    if isinstance(grads_finite, bool):
        return core.select(grads_finite, new, old)
    return tree.map_leaves(lambda a, b: a if a is None or core.all_finite(a) else b, new, old)


@np.errstate(all="ignore")
def _blended(grads_finite, new, old):
    """Select by arithmetic, which lets NaN through."""

    def blend(a, b):
        return a if a is None or a.dtype.kind != "f" else (a * grads_finite + b * (1 - grads_finite)).astype(a.dtype)

    return core.select(grads_finite, new, old) if isinstance(grads_finite, bool) else tree.map_leaves(blend, new, old)


def _selects_through_float32(grads_finite, new, old):
    """Lose what float32 has no digits for: those of float64, and counts beyond 2**24."""

    def through(leaf):
        is_wide = leaf is not None and leaf.dtype in (np.float64, np.int32)
        return leaf.astype(np.float32).astype(leaf.dtype) if is_wide else leaf

    return tree.map_leaves(through, core.select(grads_finite, new, old))


def _wide_state(policy):
    state = core.init_state(policy)
    return state._replace(loss_scale=np.float64(state.loss_scale))


WRONG = {
    "overlooks the last": ({"all_finite": _overlooks_the_last}, r"every_position_is_seen \(eager, float16\).* is True"),
    "first leaf only": ({"all_finite": _of_leaves(1)}, r"nothing_hides_an_overflow \(eager, float32\)"),
    "first of many": ({"all_finite": _of_leaves(8)}, "the flag with inf in the last of 40 is True"),
    "nothing is an overflow": ({"all_finite": _nothing_is_an_overflow}, "the flag of no leaves is False"),
    "a flag of shape (1,)": ({"all_finite": _shaped}, r"has shape \(1,\), but must have \(\)"),
    "casts the scale down": ({"scale": _each(_scale_cast_down)}, r"a float16 loss, scaled by 2\*\*16, is inf"),
    "keeps halves": (
        {"unscale": _each(_keeps_halves)},
        "bfloat16 gradient, unscaled, is bfloat16, but must be float32",
    ),
    "unscales in place": ({"unscale": _each(_in_place)}, "a float32 gradient, after it was unscaled, is"),
    "zeros for None": ({"unscale": _zeros_for_none}, "unscale lost its structure"),
    "skips leaf by leaf": ({"select": _leaf_by_leaf}, "parameter a after a step with nan in the last gradient is -1.0"),
    "blends": ({"select": _blended}, r"selection_is_atomic \(eager, float32\): the first parameter selected is nan"),
    "selects through float32": ({"select": _selects_through_float32}, r"selection_is_atomic \(eager, float64\)"),
    "a float64 state": ({"init_state": _wide_state}, "loss_scale of init_state.* is float64, but must be float32"),
    "another order": ({"unscale": lambda state, grads: 0}, r"takes \(state, grads\), but must take \(grads, state\)"),
    "one more parameter": ({"all_finite": lambda grads, *, axis: np.True_}, "also takes axis; make them keyword-only"),
    "a verb is missing": ({"select": None}, "select is missing; the five verbs are"),
}


@pytest.mark.parametrize(("wrong", "words"), WRONG.values(), ids=WRONG)
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_wrong_adapters_are_caught(wrong, words):
    """The failure says which rule was broken, how it ran, and with which value."""
    with pytest.raises(AssertionError, match=words):
        conformance.check(_with(**wrong))


def test_all_failures_are_listed():
    """One error for all: how many of how many, then a line each."""
    with pytest.raises(AssertionError) as caught:
        conformance.check(_with(all_finite=_shaped))
    first, *lines = str(caught.value).splitlines()
    assert first == f"{len(lines)} of {len(conformance.checks(NUMPY))} checks failed:"
    assert all(line.startswith("mine: ") for line in lines)


def test_a_policy_that_drifts_is_caught():
    """A policy of the user's own is checked as a scenario: its states on arrays must equal those on the host."""

    class Drifting:
        def init_state(self):
            return DynamicScaling().init_state()

        def update(self, state, grads_finite, *, xp=None):
            after = DynamicScaling().update(state, grads_finite, xp=xp)
            return after if xp is None else after._replace(steps=after.steps + 1)

    scenarios = {"mine": Scenario(Drifting(), [True, False])}
    with pytest.raises(AssertionError, match=r"states_are_the_hosts \(eager, mine\): steps after step 0 .* is 2"):
        conformance.check(NUMPY, scenarios=scenarios)


def test_a_check_says_what_it_is():
    """Its name is the adapter, the rule and the case; names are unique, so that pytest can distinguish them."""
    names = [str(check) for check in conformance.checks(NUMPY)]
    assert len(set(names)) == len(names)
    assert "numpy: every_position_is_seen (eager, float16)" in names
    assert "numpy: states_are_the_hosts (eager, bounded)" in names


def test_scenarios_take_every_branch():
    """Of every kind of policy; together they reach the smallest and the largest scale."""
    assert {scenario.policy.kind for scenario in conformance.SCENARIOS.values()} >= {"none", "fixed", "dynamic"}
    scales = []
    for policy, flags in conformance.SCENARIOS.values():
        assert {*flags} == {True, False}
        scales += simulate(policy, flags).loss_scale_after.tolist()
    assert (min(scales), max(scales)) == (core.adapters.SMALLEST_SCALE, core.adapters.LARGEST_SCALE)
