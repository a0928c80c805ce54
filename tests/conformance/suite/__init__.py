"""Checks of the rules that every adapter must follow, for the adapters of this project and of others.

```python
MINE = conformance.Adapter(name="mine", verbs=my_package, asarray=..., ways=(conformance.Way("eager"), ...))

conformance.check(MINE)  # all checks at once; or with pytest, one by one:

@pytest.mark.parametrize("check", conformance.checks(MINE), ids=str)
def test_my_adapter(check):
    check()
```

A check that fails raises an `AssertionError` that names the adapter, the way of running, the rule and the value.
"""

from tests.conformance.suite._adapter import Adapter, Way, dtype_name
from tests.conformance.suite._checks import Check, check, checks
from tests.conformance.suite._scenarios import SCENARIOS, Scenario

__all__ = ["SCENARIOS", "Adapter", "Check", "Scenario", "Way", "check", "checks", "dtype_name"]
