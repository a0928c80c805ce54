"""The command's pictures: the loss scale over the steps of a run, and the two panels of the demo.

The background is transparent. The colours are visible on light and on dark pages.
"""

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from lossscale.cli._trace import Trace

if TYPE_CHECKING:  # the demo imports threadpoolctl, which a picture of a trace does not need
    from lossscale.demo import Run

_GREY, _BLUE, _RED = "#808080", "#3b8fd4", "#e0452b"
# Colour-blind safe: https://jfly.uni-koeln.de/color/
_LINES = (
    {"color": _GREY, "linestyle": "-", "linewidth": 4.0},
    {"color": "#d55e00", "linestyle": "--", "linewidth": 1.8},
    {"color": _BLUE, "linestyle": "-.", "linewidth": 1.8},
    {"color": "#009e73", "linestyle": "-", "linewidth": 1.5},
)
_STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _GREY),
    **{"savefig.transparent": True, "legend.framealpha": 0.0, "font.size": 13, "legend.fontsize": 11},
}


def draw_trace(run: Trace, suffix: str) -> bytes:
    """Return a picture of a run's loss scale, its skipped steps and, if the trace has norms, its gradient norm."""
    has_value = np.isfinite(run.norm) & (run.norm > 0)
    has_norm = bool(has_value.any())
    with rc_context(_STYLE):
        figure = Figure(figsize=(8, 6 if has_norm else 4), layout="constrained")
        panels = figure.subplots(2 if has_norm else 1, 1, sharex=True, squeeze=False)[:, 0]
        _draw_scale(panels[0], run.step, run.scale, ~run.applied, "loss scale", color=_BLUE)
        if has_norm:
            panels[1].plot(run.step[has_value], run.norm[has_value], color="#009e73", linewidth=1.0)
            panels[1].set(yscale="log", ylabel="gradient norm")
        panels[-1].set_xlabel("step")
        return _as_picture(figure, suffix)


def draw_demo(runs: "dict[str, Run]", title: str) -> bytes:
    """Return the demo's two panels as a PNG."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(11, 5), layout="constrained")
        figure.suptitle(title)
        losses, scales = figure.subplots(1, 2)
        for (name, run), line in zip(runs.items(), _LINES, strict=True):
            loss, scale, skipped, _ = run.steps
            losses.plot(loss, label=name, **line)
            if not np.all(scale == 1.0):
                _draw_scale(scales, np.arange(len(scale)), scale, skipped, name, **line)
        losses.set(yscale="log", xlabel="step", ylabel="cross-entropy, before its weight", title="Training loss")
        scales.set(xlabel="step", title="Loss scale")
        losses.legend()
        return _as_picture(figure, "png")


def _draw_scale(axes: Any, steps: Any, scale: Any, skipped: Any, label: str, **line: Any) -> None:
    """Draw a loss scale over steps, with a cross at each skipped step."""
    axes.step(steps, scale, where="post", label=label, **line)
    at = np.flatnonzero(skipped)
    if len(at):
        axes.plot(steps[at], scale[at], linestyle="none", marker="x", markersize=5, color=_RED, label="skipped step")
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")
    axes.legend(loc="upper right" if len(steps) > 10_000 else "best")  # the search for the best place takes long


def _as_picture(figure: Figure, suffix: str) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format=suffix, dpi=110)
    return picture.getvalue()
