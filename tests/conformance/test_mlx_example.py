"""The example of MLX trains: its skipped steps do no harm, and its line tells how many there were."""

import contextlib
import io
import runpy
from pathlib import Path

from lossscale_core import metrics


def test_the_example_of_mlx_trains():
    """The first scale overflows, so that it falls; the weights of 200 steps read most of the digits."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "mlx_loop.py"))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        accuracy, state = example["main"]()
    assert accuracy > 0.9
    assert metrics(state)["steps"] == 200
    assert 0 < state.skipped_steps < 20
    assert state.loss_scale < example["POLICY"].init_scale
    assert f"{state.skipped_steps} of 200 steps skipped" in output.getvalue()
