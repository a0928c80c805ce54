"""Functions of the core for adapters and the command: checks of arguments, texts of messages, parts of a step.

They are for the packages of this project and for adapters in other packages. They may change in a minor version.
"""

from lossscale_core import _tree as tree
from lossscale_core._checkpoint import TORCH_KEYS, guard_state_from_dict, read_torch_keys
from lossscale_core._config import policy_text
from lossscale_core._guard import check_guard
from lossscale_core._messages import (
    describe,
    format_number,
    join_names,
    require_flag,
    require_pairs,
    unknown_name,
    warn_caller,
)
from lossscale_core._reports import BAD_LOSS, GradientReport, OverflowReport, locate_fault
from lossscale_core._settings import LARGEST_SCALE, SMALLEST_SCALE, check_setting
from lossscale_core._state import loss_scale_of
from lossscale_core._step import clip_divisor, decide, norm_by_unit
from lossscale_core._watch import log_event

__all__ = [
    "BAD_LOSS",
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "TORCH_KEYS",
    "GradientReport",
    "OverflowReport",
    "check_guard",
    "check_setting",
    "clip_divisor",
    "decide",
    "describe",
    "format_number",
    "guard_state_from_dict",
    "join_names",
    "locate_fault",
    "log_event",
    "loss_scale_of",
    "norm_by_unit",
    "policy_text",
    "read_torch_keys",
    "require_flag",
    "require_pairs",
    "tree",
    "unknown_name",
    "warn_caller",
]

GradientReport.__module__ = OverflowReport.__module__ = __name__  # stored in pickles; the private name may change
