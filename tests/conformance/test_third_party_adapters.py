"""The suite checks adapters of other packages, and finds functions that wait for a device."""

import types

import pytest

import lossscale_jax
import lossscale_tf
import lossscale_torch
from lossscale_core import DynamicScaling
from tests.conformance import suite as conformance
from tests.conformance.backends import jax_adapter, tf_adapter, torch_adapter


class _WaitingPolicy:
    """A policy that asks, on the host, whether the gradients were finite."""

    def init_state(self):
        return DynamicScaling().init_state()

    def update(self, state, grads_finite, *, xp=None):
        return state._replace(steps=state.steps + 1) if grads_finite else state


def _waiting_verbs(package):
    """Return verbs that are right, and of which two read a value."""

    def unscale(grads, state):
        float(state.loss_scale)
        return package.unscale(grads, state)

    def select(grads_finite, new, old):
        return package.select(bool(grads_finite), new, old)

    verbs = {name: getattr(package, name) for name in ("init_state", "scale", "all_finite")}
    return types.SimpleNamespace(**verbs, unscale=unscale, select=select)


@pytest.mark.parametrize(
    ("package", "make", "blind"),
    [
        (lossscale_torch, torch_adapter, {"compile", "meta"}),
        (lossscale_jax, jax_adapter, {"jit", "scan", "vmap", "eval_shape"}),
        (lossscale_tf, tf_adapter, {"graph", "xla", "trace"}),
    ],
    ids=["torch", "jax", "tensorflow"],
)
def test_what_waits_for_a_value_is_found(package, make, blind):
    """Two verbs and a policy of the user's own are right eagerly; in ways without values they break each rule."""
    rules = {"selection_is_atomic", "a_step_is_applied_or_skipped", "gradients_survive", "states_are_the_hosts"}
    adapter = make(verbs=_waiting_verbs(package), dtypes=("float32",))
    broken = {}
    for check in conformance.checks(adapter, scenarios={"mine": conformance.Scenario(_WaitingPolicy(), [True, False])}):
        if check.rule in rules:
            try:
                check()
            except AssertionError:
                broken.setdefault(check.case.partition(",")[0], set()).add(check.rule)
    recorded = {"compile": {"gradients_survive"}}  # Dynamo puts the read of a number into the graph
    assert broken == {way: rules - recorded.get(way, set()) for way in blind}
