"""One suite for every backend: the public one, over its own runs and over recorded ones of other tools."""

import pytest

from tests.conformance import suite as conformance
from tests.conformance.backends import BACKENDS
from tests.core.own_policies import policy_of_the_docs
from tests.core.test_tool_runs import POLICIES, RUNS


def _recorded():
    """Return each recorded run once, with the policy that stands for the tool it was recorded with."""
    found = {}
    for tool, policy in POLICIES.items():
        scenario = conformance.Scenario(policy, [flag == "0" for flag in RUNS[tool]["overflow"]])
        if scenario not in found.values():
            found[f"as {tool}"] = scenario
    return found


OWN = conformance.Scenario(policy_of_the_docs(), [True, False, False, True, False, False, False, True])
SCENARIOS = {**conformance.SCENARIOS, **_recorded(), "a policy of one's own": OWN}


@pytest.mark.parametrize(
    "check", [each for backend in BACKENDS for each in conformance.checks(backend, scenarios=SCENARIOS)], ids=str
)
def test_every_backend_conforms(check):
    """The same states, flags, values and dtypes everywhere, and nothing that waits for a value."""
    check()
