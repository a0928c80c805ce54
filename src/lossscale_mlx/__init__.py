"""Loss scaling for Apple's MLX: the five verbs over trees of arrays, and a wrapper for any of `mlx.optimizers`.

Nothing is evaluated in a step, so that `mx.compile` can trace it.
"""

try:
    import mlx.core as _mx  # noqa: F401
except ImportError as error:  # on Linux `pip install mlx` alone installs no library that computes
    message = f"lossscale_mlx cannot import mlx.core ({error}); run: pip install mlx, on Linux pip install 'mlx[cpu]'"
    raise type(error)(message, name=error.name) from error

from lossscale_mlx._optimizer import LossScaleOptimizer
from lossscale_mlx._report import overflow_report
from lossscale_mlx._verbs import all_finite, init_state, scale, select, unscale

__all__ = ["LossScaleOptimizer", "all_finite", "init_state", "overflow_report", "scale", "select", "unscale"]

# A pickle stores the module name of a class: the public one lets the private modules change.
LossScaleOptimizer.__module__ = __name__
