"""The example of a policy with a state of its own keeps its rule, on the host and on arrays."""

import importlib.util
import sys
from pathlib import Path

import pytest

from lossscale_core._base import KINDS
from lossscale_core.errors import PolicyError

EXAMPLE = Path(__file__).parents[2] / "examples" / "tolerant_policy.py"


@pytest.fixture(scope="module")
def example():
    """Return the example as a module; afterwards its kind is unknown again."""
    spec = importlib.util.spec_from_file_location("tolerant_policy", EXAMPLE)
    module = sys.modules["tolerant_policy"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tolerant_policy"], KINDS["tolerant"]


def test_a_wrong_tolerance_is_refused(example):
    """The example refuses a tolerance outside 0 to 1."""
    for share in (-0.1, 1.5):
        with pytest.raises(PolicyError, match="from 0 to 1"):
            example.TolerantScaling(tolerance=share)


def test_the_example_is_a_program(example, capsys):
    """The example passes `check_policy`, and prints the last scale of two policies."""
    example.main()
    assert capsys.readouterr().out == (
        "DynamicScaling ends with a loss scale of 1\nTolerantScaling ends with a loss scale of 65536\n"
    )
