"""The example of MLX trains, and keeps the state that the policy has on the host."""

import contextlib
import io
import runpy
from pathlib import Path

from lossscale_core import metrics


def test_the_example_of_mlx_trains():
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "mlx_loop.py"))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        accuracy, state = example["main"]()
    assert accuracy > 0.9
    assert metrics(state)["steps"] == 200
    expected = example["POLICY"].init_state()
    for n in range(200):
        expected = example["POLICY"].update(expected, n >= state.skipped_steps)
    assert state == expected
    assert "7 of 200 steps skipped" in output.getvalue()
