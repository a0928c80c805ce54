"""The example of a policy with a state of its own keeps its rule, on the host and on arrays."""

import importlib.util
import sys
from pathlib import Path

import pytest

from lossscale_core._base import KINDS
from lossscale_core.errors import PolicyError
from lossscale_core.testing import check_policy, simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "tolerant_policy.py"


@pytest.fixture(scope="module")
def example():
    """Return the example as a module; afterwards its kind is unknown again."""
    spec = importlib.util.spec_from_file_location("tolerant_policy", EXAMPLE)
    module = sys.modules["tolerant_policy"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tolerant_policy"], KINDS["tolerant"]


@pytest.mark.parametrize(
    ("settings", "overflows", "scales"),
    [
        ({"tolerance": 0.5}, "001100", [8, 8, 8, 4, 4, 4]),
        # Growth forgets the steps and not the overflows, as in fairseq: after it the share may exceed 1.
        ({"tolerance": 0.9, "growth_interval": 2}, "01001", [8, 8, 8, 16, 8]),
        ({"tolerance": 0.0, "growth_interval": 1, "max_scale": 16.0}, "0011111", [16, 16, 8, 4, 2, 1, 1]),
    ],
)
def test_the_share_of_overflows_decides(example, settings, overflows, scales):
    """The scale falls if the share of overflows exceeds the tolerance, within the bounds."""
    policy = example.TolerantScaling(init_scale=8.0, **settings)
    assert simulate(policy, [flag == "0" for flag in overflows]).loss_scale_after.tolist() == scales


def test_the_example_is_a_policy(example):
    """The example passes `check_policy`, and refuses a tolerance outside 0 to 1."""
    check_policy(example.TolerantScaling(tolerance=0.05, growth_interval=4))
    for share in (-0.1, 1.5):
        with pytest.raises(PolicyError, match="from 0 to 1"):
            example.TolerantScaling(tolerance=share)


def test_the_example_is_a_program(example, capsys):
    """The example prints the last scale of two policies."""
    example.main()
    assert capsys.readouterr().out == (
        "DynamicScaling ends with a loss scale of 1\nTolerantScaling ends with a loss scale of 65536\n"
    )
