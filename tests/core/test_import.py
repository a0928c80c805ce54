"""What importing the core brings in, seen from a new process."""

import subprocess
import sys

import pytest

import lossscale_core

FRAMEWORKS = {"torch", "jax", "jaxlib", "tensorflow", "keras", "cupy", "optax", "flax"}
EXTRAS = {"click", "matplotlib", "threadpoolctl", "hypothesis", "typing_extensions"}
LATE = {"lossscale_core.testing", "lossscale", "logging", "pathlib"}


def _printed_by(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_core_imports_little():
    """`import lossscale_core` imports no framework, test helper, table of other tools or logging."""
    code = "import numpy, sys; before = {*sys.modules}; import lossscale_core; print(*({*sys.modules} - before))"
    assert not (FRAMEWORKS | EXTRAS | LATE) & {*_printed_by(code).split()}


def test_an_unknown_name_raises_attributeerror():
    """`lossscale_core.testing` is imported at its first use; an unknown name raises `AttributeError`."""
    assert lossscale_core.testing.simulate
    with pytest.raises(AttributeError, match="module 'lossscale_core' has no attribute 'nothing'"):
        _ = lossscale_core.nothing


def test_reading_other_tools_loads_no_framework():
    """`from_tool` and `state_from_tool` import no framework."""
    loaded = _printed_by(
        "import sys, lossscale as ls; p = ls.from_tool('torch', {}); "
        "ls.state_from_tool('jmp', {'loss_scale': 8.0, 'counter': 1}, p); print(*sys.modules)"
    )
    assert not (FRAMEWORKS | EXTRAS) & {*loaded.split()}
