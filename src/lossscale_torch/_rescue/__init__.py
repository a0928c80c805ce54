"""Retries of a batch that overflowed, and buffers that a skipped step leaves unchanged.

Both use the public methods of a scaler and the observers of its updates; the step itself does not depend on them.
"""

from lossscale_torch._rescue._minimize import minimize
from lossscale_torch._rescue._protect import protect_modules

__all__ = ["minimize", "protect_modules"]
