"""Loss scaling for PyTorch: the five verbs on tensors, and `GradScaler`, a drop-in for `torch.amp.GradScaler`.

`GradScaler` accepts any policy, combines the decisions of all ranks, reports the outcome of each step, and can clip
gradients while it unscales them.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        'lossscale_torch needs torch, which is not installed; run: pip install "lossscale[torch]"', name="torch"
    ) from error

from lossscale_core import DynamicScaling, FixedScaling, NoScaling, SpikeGuard, __version__
from lossscale_torch import hooks
from lossscale_torch._extras._float32_plan import float32_plan, keep_in_float32
from lossscale_torch._extras._guarded import GuardedOptimizer, clip_and_check_, guarded
from lossscale_torch._extras._range_report import RangeReport, range_report
from lossscale_torch._report import overflow_report
from lossscale_torch._scaler import GradScaler
from lossscale_torch._step_info import StepInfo
from lossscale_torch._verbs import all_finite, init_state, scale, select, unscale

__all__ = [
    "DynamicScaling",
    "FixedScaling",
    "GradScaler",
    "GuardedOptimizer",
    "NoScaling",
    "RangeReport",
    "SpikeGuard",
    "StepInfo",
    "__version__",
    "all_finite",
    "clip_and_check_",
    "float32_plan",
    "guarded",
    "hooks",
    "init_state",
    "keep_in_float32",
    "overflow_report",
    "range_report",
    "scale",
    "select",
    "unscale",
]

for _public in (GradScaler, GuardedOptimizer, RangeReport, StepInfo):
    _public.__module__ = __name__  # a pickle stores the public module name
