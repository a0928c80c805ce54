"""The rules of a policy's fields as data; the checks and the command's tables are made from them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lossscale_core._messages import describe
from lossscale_core.errors import PolicyError

SMALLEST_SCALE = 2.0**-126
"""The smallest loss scale of any policy; smaller scales are subnormal in float32 and lose bits."""
LARGEST_SCALE = 2.0**126
"""The largest loss scale of any policy; the reciprocals of larger scales are subnormal in float32 and lose bits."""
LARGEST_COUNT = 2**31 - 1
"""The largest number in an int32 counter; a counter that reaches it stays there."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """The values that a field accepts: a type and, for numbers, an inclusive range."""

    type: type[float] | type[int] | type[bool]
    text: str
    hint: str
    minimum: float = 0.0
    maximum: float = 0.0
    optional: bool = False

    def validate(self, name: str, value: Any) -> Any:
        """Return `value` as the Python type of this rule. Raises `PolicyError` for a value that breaks the rule."""
        if value is None and self.optional:
            return None
        # np.int64 and np.float32 are neither int nor float, and json could not write them.
        value = value.item() if isinstance(value, np.generic) else value
        if not self.accepts(value):
            raise PolicyError(f"{name}={describe(value)} must be {self.text}; {self.hint}")
        return self.type(value)

    def accepts(self, value: Any) -> bool:
        """Return whether `value` has the type and the range; `True` is not a number, and 2000.0 is a whole number."""
        if self.type is bool or isinstance(value, bool):
            return self.type is bool and isinstance(value, bool)
        if not isinstance(value, int | float):
            return False
        # The range comes first, since int() raises for NaN and infinity.
        return bool(self.minimum <= value <= self.maximum) and (self.type is float or value == int(value))


SCALE = Rule(
    float,
    "a number from 2**-126 to 2**126, where the scale and its reciprocal are both normal float32 numbers",
    "pass a power of two such as 2.0**16",
    SMALLEST_SCALE,
    LARGEST_SCALE,
)
COUNT = Rule(int, "a whole number from 1 to 2**31 - 1", "pass an int such as 1", 1, LARGEST_COUNT)
COUNT_OR_ZERO = Rule(int, "a whole number from 0 to 2**31 - 1", "pass 0 to turn it off", 0, LARGEST_COUNT)
COUNT_OR_NONE = dataclasses.replace(
    COUNT, text="None or a whole number from 1 to 2**31 - 1", hint="pass None for no limit", optional=True
)
FLAG = Rule(bool, "True or False", "pass True or False")
NUMBER = Rule(float, "a number from -2**126 to 2**126", "pass a number such as 1.0", -LARGEST_SCALE, LARGEST_SCALE)

RULES = {
    "init_scale": SCALE,
    "growth_factor": Rule(
        float,
        "above 1 (at least 1 + 2**-23, the next float32) and at most 2**126",
        "pass 2.0 to double the scale, or use FixedScaling to keep it",
        1.0 + 2.0**-23,  # a factor nearer to 1 would round to 1 in float32, and never change a scale
        LARGEST_SCALE,
    ),
    "backoff_factor": Rule(
        float,
        "between 0 and 1, both excluded (from 2**-126 to 1 - 2**-24, the largest float32 below 1)",
        "pass 0.5 to halve the scale, or use FixedScaling to keep it",
        SMALLEST_SCALE,
        1.0 - 2.0**-24,
    ),
    "growth_interval": COUNT,
    "hysteresis": COUNT,
    "refill_on_finite": FLAG,
    "refill_on_backoff": FLAG,
    "cooldown": COUNT_OR_ZERO,
    "min_scale": dataclasses.replace(SCALE, hint="pass 1.0 or less, or leave it out for 2**-126"),
    "max_scale": dataclasses.replace(SCALE, hint="pass a power of two such as 2.0**24, or leave it out for 2**126"),
    "max_overflow_streak": COUNT_OR_NONE,
}
"""The rule of each setting of the policies, by name."""

_MAX_NORM = Rule(float, "a number from 0", "pass math.inf for no clipping", maximum=math.inf)
_ARGUMENTS = {
    "max_norm": _MAX_NORM,  # 0 makes all gradients zero in torch and optax, and does not clip in Keras
    "global_clipnorm": dataclasses.replace(_MAX_NORM, text="a positive number", minimum=float(np.nextafter(0.0, 1.0))),
    "retries": dataclasses.replace(COUNT_OR_ZERO, hint="pass 8, or 0 for one try"),
    "accumulation_steps": dataclasses.replace(COUNT, hint="pass 1, or leave it out, for a step after each batch"),
    "every_n_batches": dataclasses.replace(COUNT_OR_NONE, hint="leave it out for epochs only"),
}
"""The rule of each number that adapters take in addition to a policy, by argument."""


def check_setting(name: str, value: Any) -> Any:
    """Check a value by the rule of one setting or argument.

    Args:
        name: A setting of the library's policies, such as `"growth_interval"`, or an argument of the adapters:
            `"max_norm"`, `"global_clipnorm"`, `"retries"`, `"accumulation_steps"` or `"every_n_batches"`.
        value: Any value.

    Returns:
        The value as a plain Python number or bool, or None if the setting accepts None.

    Raises:
        PolicyError: The value breaks the rule. The message names the value, the rule and a valid value.
        KeyError: `name` is not a setting.
    """
    if name in _ARGUMENTS and getattr(value, "shape", None) in ((), (1,)) and hasattr(value, "item"):
        value = value.item()  # an array of one element, of any framework
    return (RULES.get(name) or _ARGUMENTS[name]).validate(name, value)


_RULES_OF_TYPES = {"float": NUMBER, "int": COUNT_OR_ZERO, "bool": FLAG}


def rules_of(policy_type: type[Any]) -> list[tuple[dataclasses.Field[Any], Rule]]:
    """Return each field of a policy class with the rule for its name, or else the rule for its type."""
    rules = []
    for field in dataclasses.fields(policy_type) if dataclasses.is_dataclass(policy_type) else ():
        # `from __future__ import annotations` in the file of a policy turns the types of its fields into text.
        type_name = getattr(field.type, "__name__", field.type)
        rule = RULES.get(field.name) or _RULES_OF_TYPES.get(str(type_name))
        if rule is None:
            raise TypeError(f"{field.name} is declared as {field.type}; declare a setting as float, int or bool")
        rules.append((field, rule))
    return rules


def require_ordered_scales(settings: Mapping[str, Any]) -> None:
    """Require `min_scale` ≤ `init_scale` ≤ `max_scale`; a name may be missing from the settings."""
    for low, high in (("min_scale", "max_scale"), ("min_scale", "init_scale"), ("init_scale", "max_scale")):
        if low in settings and high in settings and settings[low] > settings[high]:
            raise PolicyError(
                f"{low}={settings[low]!r} must not exceed {high}={settings[high]!r}; lower {low} or raise {high}"
            )
