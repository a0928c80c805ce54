"""Unit-test a scaling policy on a CPU, with no framework and no training.

```python
trace = simulate(DynamicScaling(growth_interval=3), [True, True, True, False])
trace.loss_scale_after  # 65536, 65536, 131072, 65536
```

`lossscale_core.testing.loops` has functions for checks of training loops; import it separately.
"""

from lossscale_core.testing._check import check_policy
from lossscale_core.testing._simulation import LARGEST_NUMBER, TITLES, Trace, simulate, simulate_gradients, trace_to_csv

__all__ = ["LARGEST_NUMBER", "TITLES", "Trace", "check_policy", "simulate", "simulate_gradients", "trace_to_csv"]

Trace.__module__ = __name__  # stored in pickles; the private name may change
