"""The suite checks adapters of other packages, and finds functions that wait for a device."""

import types

import pytest
import torch

import lossscale_jax
import lossscale_tf
import lossscale_torch
from lossscale_core import DynamicScaling
from tests.conformance import suite as conformance
from tests.conformance.backends import jax_adapter, tf_adapter, torch_adapter


def _verbs(package, **wrong):
    verbs = {name: getattr(package, name) for name in ("init_state", "scale", "all_finite", "unscale", "select")}
    return types.SimpleNamespace(**{**verbs, **wrong})


def _failures(adapter, rules, scenarios=conformance.SCENARIOS):
    """Return which of these rules `adapter` breaks, by the way of running."""
    broken = {}
    for check in conformance.checks(adapter, scenarios=scenarios):
        if check.rule in rules:
            try:
                check()
            except AssertionError:
                broken.setdefault(check.case.partition(",")[0], set()).add(check.rule)
    return broken


def _waiting_select(package):
    def select(grads_finite, new, old):
        return package.select(bool(grads_finite), new, old)

    return select


@pytest.mark.parametrize(
    ("package", "make", "blind"),
    [
        (lossscale_torch, torch_adapter, {"compile", "meta"}),
        (lossscale_jax, jax_adapter, {"jit", "scan", "vmap", "eval_shape"}),
        (lossscale_tf, tf_adapter, {"graph", "xla", "trace"}),
    ],
    ids=["torch", "jax", "tensorflow"],
)
def test_a_select_that_waits_for_the_flag_is_found(package, make, blind):
    """Eagerly its result is right; in ways without values it breaks both rules that use it."""
    rules = {"selection_is_atomic", "a_step_is_applied_or_skipped"}
    adapter = make(verbs=_verbs(package, select=_waiting_select(package)), dtypes=("float32",))
    assert _failures(adapter, rules) == dict.fromkeys(blind, rules)


class _WaitingPolicy:
    """A policy that asks, on the host, whether the gradients were finite."""

    def init_state(self):
        return DynamicScaling().init_state()

    def update(self, state, grads_finite, *, xp=None):
        return state._replace(steps=state.steps + 1) if grads_finite else state


@pytest.mark.parametrize(
    ("make", "way"),
    [(torch_adapter, "meta"), (jax_adapter, "eval_shape"), (tf_adapter, "trace")],
    ids=["torch", "jax", "tensorflow"],
)
def test_an_update_that_waits_for_the_flag_is_found(make, way):
    """A policy of the user's own is checked as a scenario: if it reads a value, ways without values raise an error."""
    scenarios = {"mine": conformance.Scenario(_WaitingPolicy(), [True, False])}
    broken = _failures(make(), {"states_are_the_hosts"}, scenarios)
    assert way in broken
    assert "eager" not in broken


def test_an_unscale_that_waits_for_the_scale_is_found():
    """Reading the scale to multiply by a Python number is found on torch's meta device."""

    def unscale(grads, state):
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda grad: grad / state.loss_scale.item(), grads)

    adapter = torch_adapter(verbs=_verbs(lossscale_torch, unscale=unscale), dtypes=("float32",))
    broken = _failures(adapter, {"gradients_survive"})
    assert "meta" in broken
    assert "eager" not in broken
