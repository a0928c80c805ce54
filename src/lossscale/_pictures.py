"""Drawing that the demo and the command share: the loss scale over the steps of a run."""

import io
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, which needs no display."""
    return Figure(figsize=(width, height), layout="constrained")


def as_picture(figure: Figure, suffix: str = "png") -> bytes:
    """Return a figure as the content of a `png`, `pdf` or `svg` file."""
    picture = io.BytesIO()
    figure.savefig(picture, format=suffix.lower(), dpi=110)
    return picture.getvalue()


def draw_scale(axes: Any, loss_scale: Any, skipped: Any, colour: str, label: str) -> None:
    """Draw a loss scale over steps, with a cross at each skipped step."""
    axes.step(range(len(loss_scale)), loss_scale, where="post", color=colour, label=label)
    steps = np.flatnonzero(skipped)
    if len(steps):
        axes.plot(steps, np.asarray(loss_scale)[steps], "x", color="#cc0000", markersize=5, label="skipped step")
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale")
    axes.legend()
