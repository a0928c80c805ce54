"""Loss scaling for float16 training without a framework: policies, states and the five verbs on NumPy.

A policy (`DynamicScaling()`) is a frozen config, and a state is a small NamedTuple of scalars. The loss scale changes
only in `policy.update(state, grads_finite)`. The packages `lossscale_torch`, `lossscale_jax`, `lossscale_tf` and
`lossscale_keras` have functions of the same names for arrays on their framework's devices.
"""

import typing as _typing

from lossscale_core import adapters, errors, files
from lossscale_core._arrays import all_finite, scale, select, unscale
from lossscale_core._base import BaseScaling, ScalingPolicy
from lossscale_core._checkpoint import state_from_dict, state_to_dict
from lossscale_core._config import (
    PolicyLike,
    as_policy,
    dump_policy,
    init_state,
    load_policy,
    policy_from_dict,
    policy_to_dict,
)
from lossscale_core._diagnosis import check_limits, diagnose
from lossscale_core._gradient_range import GradientRange, gradient_range
from lossscale_core._guard import GuardState, SpikeGuard
from lossscale_core._outcome import StepInfo, metrics, step_info
from lossscale_core._policy import DynamicScaling, FixedScaling, NoScaling
from lossscale_core._state import ScaleState, saturating_increment
from lossscale_core._watch import ScaleWatch

if _typing.TYPE_CHECKING:
    from lossscale_core import testing

__version__ = "0.1.0"

__all__ = [
    "BaseScaling",
    "DynamicScaling",
    "FixedScaling",
    "GradientRange",
    "GuardState",
    "NoScaling",
    "PolicyLike",
    "ScaleState",
    "ScaleWatch",
    "ScalingPolicy",
    "SpikeGuard",
    "StepInfo",
    "__version__",
    "adapters",
    "all_finite",
    "as_policy",
    "check_limits",
    "diagnose",
    "dump_policy",
    "errors",
    "files",
    "gradient_range",
    "init_state",
    "load_policy",
    "metrics",
    "policy_from_dict",
    "policy_to_dict",
    "saturating_increment",
    "scale",
    "select",
    "state_from_dict",
    "state_to_dict",
    "step_info",
    "testing",
    "unscale",
]


if not _typing.TYPE_CHECKING:  # type checkers would otherwise accept every name

    def __getattr__(name):
        if name != "testing":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Training does not need this module, and its import takes time in each process of a run. The import statement
        # sets the name in this module, so that only the first use calls this function.
        import lossscale_core.testing

        return lossscale_core.testing


# Pickles store the module name of a class. With the public name, the private modules may change.
for _name in __all__:
    if isinstance(globals().get(_name), type):
        globals()[_name].__module__ = __name__
del _name
