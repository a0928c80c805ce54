"""What can go wrong; each error is also the built-in exception its users would expect.

```
LossScaleError
├── PolicyError(ValueError)                  a policy, or the file or dict it came from, breaks a rule
├── CallOrderError(RuntimeError)             calls came in an order that would corrupt gradients
├── CheckpointError(ValueError)              a saved state cannot be restored
├── TraceFileError(ValueError)               a recorded run cannot be read
├── ScaleStateError(LookupError)             an optimizer state holds no scale state, or several
├── SyncError(RuntimeError)                  ranks that must hold the same state do not
└── OverflowStreakError(FloatingPointError)  too many overflows in a row: the run is not training
CheckpointWarning(UserWarning)               a run goes on without its saved state, or under another policy
DialectWarning(UserWarning)                  another tool's config runs into something that tool does wrong
```

A message names the value, the rule it broke and how to mend it.
"""


class LossScaleError(Exception):
    """Base of every error this library raises on purpose."""


class PolicyError(LossScaleError, ValueError):
    """A policy, or the file or dict it came from, breaks a rule."""


class CallOrderError(LossScaleError, RuntimeError):
    """Calls came in an order that would corrupt gradients."""


class CheckpointError(LossScaleError, ValueError):
    """A saved state cannot be restored."""


class TraceFileError(LossScaleError, ValueError):
    """A recorded run cannot be read: its file does not hold a value a step."""


class ScaleStateError(LossScaleError, LookupError):
    """An optimizer state holds no scale state, or several."""


class SyncError(LossScaleError, RuntimeError):
    """Ranks that must hold the same state do not."""


class OverflowStreakError(LossScaleError, FloatingPointError):
    """The policy's `max_overflow_streak` was reached: the run is not training."""


class CheckpointWarning(UserWarning):
    """A run goes on without its saved state, or under another policy than the saved one."""


class DialectWarning(UserWarning):
    """Another tool's config runs into something that the tool does wrong; the message says what is done here."""
