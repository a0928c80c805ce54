"""The versions that `lossscale --version` prints."""

import contextlib
import importlib.metadata
import platform

from lossscale_core import __version__

# Other builds of a package have distributions of other names.
_DISTRIBUTIONS = ("numpy", "torch", "jax", "optax", "flax", "tensorflow", "tensorflow-cpu", "keras", "tf_keras")


def versions() -> str:
    """Return a line each for lossscale, Python and the installed frameworks, without an import of them."""
    lines = [f"lossscale {__version__}", f"python {platform.python_version()}"]
    # The metadata is read instead of __version__, since an import of all frameworks takes some ten seconds.
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lines.append(f"{name} {importlib.metadata.version(name)}")
    return "\n".join(lines)
