"""What importing the core brings in, seen from a new process."""

import subprocess
import sys

import pytest

import lossscale_core

FRAMEWORKS = {"torch", "jax", "jaxlib", "tensorflow", "keras", "cupy", "optax", "flax"}
EXTRAS = {"click", "matplotlib", "threadpoolctl", "hypothesis", "typing_extensions"}
LATE = {"lossscale_core.testing", "lossscale", "logging", "pathlib"}


def test_the_core_imports_little():
    """`import lossscale_core` imports no framework, test helper, table of other tools or logging."""
    code = "import numpy, sys; before = {*sys.modules}; import lossscale_core; print(*({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not (FRAMEWORKS | EXTRAS | LATE) & {*done.stdout.split()}


def test_an_unknown_name_raises_attributeerror():
    """`lossscale_core.testing` is imported at its first use; an unknown name raises `AttributeError`."""
    assert lossscale_core.testing.simulate
    with pytest.raises(AttributeError, match="module 'lossscale_core' has no attribute 'nothing'"):
        _ = lossscale_core.nothing
