"""Loss scaling for PyTorch: the five verbs on tensors, and `GradScaler`, a drop-in for `torch.amp.GradScaler`.

`GradScaler` takes any policy, decides together with every rank, says what a step did, and can clip while it unscales.
"""

from lossscale_core import GradientReport
from lossscale_torch._grads import all_finite, scale, select, unscale
from lossscale_torch._optimizer import GradScaler
from lossscale_torch._report import overflow_report
from lossscale_torch._state import init_state

__all__ = [
    "GradScaler",
    "GradientReport",
    "all_finite",
    "init_state",
    "overflow_report",
    "scale",
    "select",
    "unscale",
]

GradScaler.__module__ = __name__  # a pickle names the face, so that rooms behind it may move
