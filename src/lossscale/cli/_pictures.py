"""The command's pictures: the loss scale over the steps of a run, and the three panels of the demo."""

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:  # the demo imports scikit-learn, which a picture of a trace does not need
    from lossscale.demo import Experiment

_COLOURS = ("#bbbbbb", "#d55e00", "#0072b2", "#009e73")  # colour-blind safe: https://jfly.uni-koeln.de/color/
_LINES = tuple(
    {"color": colour, "linestyle": style, "linewidth": width}
    for colour, style, width in zip(_COLOURS, ("-", "--", "-.", "-"), (5.0, 1.8, 1.8, 1.5), strict=True)
)
_SMOOTHING = 9


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches; unlike pyplot's, it does not need a display."""
    return Figure(figsize=(width, height), layout="constrained")


def as_picture(figure: Figure, suffix: str = "png") -> bytes:
    """Return the content of a `png`, `pdf` or `svg` file with the figure."""
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


def experiment_as_png(experiment: "Experiment") -> bytes:
    """Return the experiment's three panels as a PNG."""
    figure = new_figure(15, 4.6)
    losses, scales, weights = figure.subplots(1, 3)
    _draw_losses(losses, experiment)
    _draw_scales(scales, experiment)
    _draw_sweep(weights, experiment)
    settings = experiment.settings
    figure.suptitle(
        f"Handwritten digits in float16 ({settings.framework}), loss × {settings.weight:g}, seed {settings.seed}"
    )
    return as_picture(figure)


def _draw_losses(axes: Any, experiment: "Experiment") -> None:
    for (name, run), line in zip(experiment.runs.items(), _LINES, strict=True):
        axes.plot(_smoothed([step.loss for step in run.steps]), label=name, **line)
    axes.set(yscale="log", xlabel="step", ylabel="cross-entropy, before its weight", title="Training loss")
    axes.legend()


def _draw_scales(axes: Any, experiment: "Experiment") -> None:
    scaled = list(experiment.runs.items())[2:]
    for (name, run), colour in zip(scaled, _COLOURS[2:], strict=True):
        draw_scale(axes, [step.loss_scale for step in run.steps], [step.skipped for step in run.steps], colour, name)
    axes.set_title("Loss scale")


def _draw_sweep(axes: Any, experiment: "Experiment") -> None:
    for (name, accuracy), line in zip(experiment.sweep.items(), _LINES, strict=True):
        axes.plot(list(accuracy), list(accuracy.values()), marker="o", markersize=4, label=name, **line)
    axes.axvline(experiment.settings.weight, color="#999999", linewidth=0.8)
    axes.set(xscale="log", ylim=(0.0, 1.02), ylabel="test accuracy", title="How small a loss survives")
    axes.set_xlabel("weight of the loss (the grey line marks the weight of the other panels)")
    axes.invert_xaxis()
    axes.legend(loc="lower left")


def _smoothed(values: list[float]) -> Any:
    window = min(_SMOOTHING, len(values))
    return np.convolve(values, np.ones(window) / window, mode="valid")
