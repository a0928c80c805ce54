"""The errors and warnings of the library; each error also derives from a matching built-in exception.

```
LossScaleError
├── PolicyError(ValueError)                    a policy, its file or its dict breaks a rule
├── CallOrderError(RuntimeError)               this order of calls would corrupt gradients
├── CheckpointError(ValueError)                a saved state cannot be restored
├── ScaleStateError(LookupError)               an optimizer state holds no scale state, or several
├── SyncError(RuntimeError)                    ranks that must hold the same state do not
├── RetriesExhaustedError(FloatingPointError)  a step overflowed in each of its tries
└── OverflowStreakError(FloatingPointError)    too many overflows or spikes in a row
CheckpointWarning(UserWarning)                 no saved state, or another policy than before
```

A message says what was given, what is allowed and what to do.
"""

from typing import TYPE_CHECKING


class LossScaleError(Exception):
    """The base class of the errors that this library raises."""

    if not TYPE_CHECKING:
        # AutoGraph adds lines to a message, and makes an error of the same type only if it has this constructor:
        # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/autograph/pyct/error_utils.py
        __init__ = Exception.__init__


class PolicyError(LossScaleError, ValueError):
    """A policy, or the file or dict that describes it, breaks a rule."""


class CallOrderError(LossScaleError, RuntimeError):
    """Calls were made in an order that would corrupt gradients."""


class CheckpointError(LossScaleError, ValueError):
    """A saved state cannot be restored."""


class ScaleStateError(LossScaleError, LookupError):
    """An optimizer state holds no scale state, or several."""


class SyncError(LossScaleError, RuntimeError):
    """Ranks that must hold the same state do not."""


class RetriesExhaustedError(LossScaleError, FloatingPointError):
    """A step overflowed in each of its tries; the message names the loss scales of the tries."""


class OverflowStreakError(LossScaleError, FloatingPointError):
    """The policy's `max_overflow_streak` was reached, or the guard's `max_streak`: the run is not training."""


class CheckpointWarning(UserWarning):
    """A run continues without its saved state, or under a policy that differs from the saved one."""
