"""The comparison of another tool's scaler with `from_tool` and `state_from_tool`, which each framework's tests use."""

import math

from lossscale import from_tool, state_from_tool
from lossscale_core.adapters import LARGEST_SCALE, SMALLEST_SCALE


def check_scaler(name, config, step, saved, policies, grads_finite, stop=None):
    """Require the scales of a tool's scaler, also from the library's runs that continue its run after `stop` steps.

    `step(flag)` takes a step of the tool and returns the scale. `saved()` returns the saved state, in each form that
    users pass. `policies` are the policies of the tool's own config and of the library's drop-in.
    """
    policy = from_tool(name, config)
    assert [*policies] == [policy] * len(policies)
    is_exact = {math.frexp(factor)[0] for factor in (policy.growth_factor, policy.backoff_factor)} == {0.5}
    states = [policy.init_state()]
    for number, finite in enumerate(grads_finite):
        if number == stop:
            states += [state_from_tool(name, entries, policy) for entries in saved()]
            assert [state_from_tool(name, entries) for entries in saved()] == states[1:]
        scale = float(step(finite))
        if not SMALLEST_SCALE < scale < LARGEST_SCALE:
            return
        states = [policy.update(state, finite) for state in states]
        error = 0.0 if is_exact else 1e-6 * scale * (number + 1)
        assert max(abs(float(state.loss_scale) - scale) for state in states) <= error
