"""What every adapter must do, as checks that anybody can run on one of their own.

```python
MINE = conformance.Adapter(name="mine", verbs=my_package, asarray=..., ways=(conformance.Way("eager"), ...))

conformance.check(MINE)  # all of them; or one by one, with pytest:

@pytest.mark.parametrize("check", conformance.checks(MINE), ids=str)
def test_my_adapter(check):
    check()
```

A check that fails raises an `AssertionError` with the adapter, the way of running it, the rule and the value.
"""

from lossscale_core.testing.conformance._adapter import Adapter, Way, dtype_name
from lossscale_core.testing.conformance._checks import Check, check, checks
from lossscale_core.testing.conformance._scenarios import SCENARIOS, Scenario

__all__ = ["SCENARIOS", "Adapter", "Check", "Scenario", "Way", "check", "checks", "dtype_name"]

for _type in (Adapter, Way, Check, Scenario):  # a pickle names the face, so that rooms behind it may move
    _type.__module__ = __name__
del _type
