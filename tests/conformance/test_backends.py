"""One suite for every backend."""

import pytest

from tests.conformance import suite as conformance
from tests.conformance.backends import BACKENDS
from tests.core.own_policies import policy_of_the_docs

OWN = conformance.Scenario(policy_of_the_docs(), [True, False, False, True, False, False, False, True])
SCENARIOS = {**conformance.SCENARIOS, "a policy of one's own": OWN}


# array-api-strict computes with NumPy, which warns when a large growth_factor makes an infinite product.
@pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize(
    "check", [each for backend in BACKENDS for each in conformance.checks(backend, scenarios=SCENARIOS)], ids=str
)
def test_every_backend_conforms(check):
    """The same states, flags, values and dtypes everywhere, and nothing that waits for a value."""
    check()
