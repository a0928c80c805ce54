"""The versions that `lossscale --version` prints."""

import contextlib
import importlib.metadata
import platform

from lossscale_core import __version__

# Two builds of a package may have different distribution names.
_DISTRIBUTIONS = ("numpy", "torch", "jax", "optax", "flax", "tensorflow", "tensorflow-cpu", "keras", "tf_keras")


def versions() -> str:
    """Return a line for lossscale, Python and each installed framework, without importing the frameworks."""
    lines = [f"lossscale {__version__}", f"python {platform.python_version()}"]
    # The metadata has the versions, too; importing all frameworks would take about ten seconds.
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lines.append(f"{name} {importlib.metadata.version(name)}")
    return "\n".join(lines)
