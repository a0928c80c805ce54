"""The demo's picture: what the loss did, what the scale did, and how small a loss each regime survives."""

from typing import Any

import numpy as np

from lossscale._pictures import as_picture, draw_scale, new_figure
from lossscale.demo._records import Experiment

_COLOURS = ("#bbbbbb", "#d55e00", "#0072b2", "#009e73")  # after Okabe and Ito: colour-blind readers tell them apart
_LINES = tuple(
    {"color": colour, "linestyle": style, "linewidth": width}
    for colour, style, width in zip(_COLOURS, ("-", "--", "-.", "-"), (5.0, 1.8, 1.8, 1.5), strict=True)
)
_SMOOTHING = 9


def as_png(experiment: Experiment) -> bytes:
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


def _draw_losses(axes: Any, experiment: Experiment) -> None:
    for (name, run), line in zip(experiment.runs.items(), _LINES, strict=True):
        axes.plot(_smoothed([step.loss for step in run.steps]), label=name, **line)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, before its weight")
    axes.set_title("Training loss")
    axes.legend()


def _draw_scales(axes: Any, experiment: Experiment) -> None:
    scaled = list(experiment.runs.items())[2:]
    for (name, run), colour in zip(scaled, _COLOURS[2:], strict=True):
        draw_scale(axes, [step.loss_scale for step in run.steps], [step.skipped for step in run.steps], colour, name)
    axes.set_title("Loss scale")


def _draw_sweep(axes: Any, experiment: Experiment) -> None:
    for (name, accuracy), line in zip(experiment.sweep.items(), _LINES, strict=True):
        axes.plot(list(accuracy), list(accuracy.values()), marker="o", markersize=4, label=name, **line)
    axes.axvline(experiment.settings.weight, color="#999999", linewidth=0.8)
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel("weight of the loss (the grey line is the one at the left)")
    axes.set_ylabel("test accuracy")
    axes.set_title("How small a loss survives")
    axes.legend(loc="lower left")


def _smoothed(values: list[float]) -> Any:
    window = min(_SMOOTHING, len(values))
    return np.convolve(values, np.ones(window) / window, mode="valid")
