"""The command's pictures: the loss scale over the steps of a run, and the three panels of the demo."""

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

if TYPE_CHECKING:  # the demo imports scikit-learn, which a picture of a trace does not need
    from lossscale.cli._run_file import RecordedRun
    from lossscale.demo import Experiment

_COLOURS = ("#bbbbbb", "#d55e00", "#0072b2", "#009e73")  # colour-blind safe: https://jfly.uni-koeln.de/color/
_LINES = tuple(
    {"color": colour, "linestyle": style, "linewidth": width}
    for colour, style, width in zip(_COLOURS, ("-", "--", "-.", "-"), (5.0, 1.8, 1.8, 1.5), strict=True)
)
_LONG = 10_000
_SMOOTHING = 9


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches; unlike pyplot's, it does not need a display."""
    return Figure(figsize=(width, height), layout="constrained")


def as_picture(figure: Figure, suffix: str = "png") -> bytes:
    """Return the content of a `png`, `pdf` or `svg` file with the figure."""
    picture = io.BytesIO()
    figure.savefig(picture, format=suffix.lower(), dpi=110)
    return picture.getvalue()


def draw_scale(axes: Any, loss_scale: Any, skipped: Any, label: str, **line: Any) -> None:
    """Draw a loss scale over steps, with a cross at each skipped step."""
    steps = np.arange(len(loss_scale))
    axes.step(steps, loss_scale, where="post", label=label, **line)
    _mark(axes, steps, np.asarray(loss_scale), skipped, "skipped step", marker="x", color="#cc0000")
    _label_scale(axes)


def draw_run(figure: Figure, run: "RecordedRun") -> None:
    """Draw a recorded run: its loss scale, the share of skipped steps and, if it is known, the gradient norm."""
    heights = [3.0, 1.0] if run.norm is None else [3.0, 1.0, 1.5]
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    _draw_marked_scale(panels[0], run)
    _draw_share(panels[1], run)
    if run.norm is not None:
        _draw_norms(panels[2], run.step, run.norm)
    panels[0].set_xlabel("")
    panels[-1].set_xlabel("step")


def _draw_share(axes: Any, run: "RecordedRun") -> None:
    """Draw the share of skipped steps."""
    # At most 50 windows fit side by side, since finer ones could not be distinguished in the picture.
    window = max(_SMOOTHING, len(run.step) // 50)
    share = _running_mean(run.overflowed | run.spiked, window)
    axes.fill_between(run.step, share * 100.0, step="post", color="#999999")
    title = f"share of skipped steps, mean of the last {window}"
    axes.set(ylabel="skipped (%)", ylim=(0.0, None if share.max() > 0.01 else 1.0), title=title)


def _draw_norms(axes: Any, steps: Any, norms: Any) -> None:
    """Draw gradient norms, from a decade on with a logarithmic axis; infinite ones are crosses at the upper edge."""
    known, infinite = np.isfinite(norms), np.isinf(norms)
    axes.plot(steps[known], norms[known], color="#009e73", linewidth=1.0)
    axes.set_ylabel("gradient norm")
    positive = norms[known & (norms > 0)]
    decades = np.log10(positive.max() / positive.min()) if len(positive) else 0.0
    if decades >= 1:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2 else (1.0,), numticks=5))
        axes.yaxis.set_minor_locator(NullLocator())
    if infinite.any():
        at_edge = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        mark = {"marker": "x", "color": "#cc0000", "markersize": 5, "linestyle": "none"}
        axes.plot(steps[infinite], np.ones(int(infinite.sum())), label="infinite", **mark, **at_edge)
        axes.legend(loc="upper right")


def _draw_marked_scale(axes: Any, run: "RecordedRun") -> None:
    axes.step(run.step, run.scale, where="post", color="#0072b2", label="loss scale")
    _mark(axes, run.step, run.scale, run.overflowed, "overflow", marker="x", color="#cc0000")
    _mark(axes, run.step, run.scale, run.spiked, "spike", marker="^", color="#000000")
    _label_scale(axes)
    axes.set_title(summary(run), size="medium")


def summary(run: "RecordedRun") -> str:
    """Return a recorded run's counts in a line."""
    overflows, spikes = int(run.overflowed.sum()), int(run.spiked.sum())
    counts = f"{overflows} overflowed" + (f", {spikes} spiked" if spikes else "")
    return f"{len(run.step)} steps: {counts}, {(run.overflowed | run.spiked).mean():.1%} skipped"


def _mark(axes: Any, steps: Any, scale: Any, is_marked: Any, label: str, **style: Any) -> None:
    at = np.flatnonzero(is_marked)
    if len(at):
        axes.plot(steps[at], scale[at], linestyle="none", markersize=5, label=label, **style)


def _running_mean(flags: Any, window: int) -> Any:
    """Return for each step the share of flags among the last `window` ones, or among all if they are fewer."""
    total = np.concatenate([[0.0], np.cumsum(flags)])
    last = np.arange(1, len(total))
    first = np.maximum(last - window, 0)
    return (total[last] - total[first]) / (last - first)


def _label_scale(axes: Any) -> None:
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale")
    # The search for the best place takes long for many points, and matplotlib warns of it.
    is_long = any(len(line.get_xdata()) > _LONG for line in axes.lines)
    axes.legend(loc="upper right" if is_long else "best")


def experiment_as_png(experiment: "Experiment") -> bytes:
    """Return the experiment's three panels as a PNG."""
    return as_picture(experiment_figure(experiment))


def experiment_figure(experiment: "Experiment") -> Figure:
    """Return the experiment's three panels; each regime has the same line in all of them."""
    with rc_context({"font.size": 13, "legend.fontsize": 11}):  # no text below 9 pixels on a page of 800
        figure = new_figure(13.5, 4.8)
        losses, scales, weights = figure.subplots(1, 3)
        _draw_losses(losses, experiment)
        _draw_scales(scales, experiment)
        _draw_sweep(weights, experiment)
        settings = experiment.settings
        figure.suptitle(f"numpy: loss × {settings.weight:g}, seed {settings.seed}")
    return figure


def _draw_losses(axes: Any, experiment: "Experiment") -> None:
    for (name, run), line in zip(experiment.runs.items(), _LINES, strict=True):
        axes.plot(_smoothed([step.loss for step in run.steps]), label=name, **line)
    axes.set(yscale="log", xlabel="step", ylabel="cross-entropy, before its weight", title="Training loss")
    axes.legend()


def _draw_scales(axes: Any, experiment: "Experiment") -> None:
    for (name, run), line in list(zip(experiment.runs.items(), _LINES, strict=True))[2:]:
        draw_scale(axes, [step.loss_scale for step in run.steps], [step.skipped for step in run.steps], name, **line)
    axes.set_title("Loss scale")


def _draw_sweep(axes: Any, experiment: "Experiment") -> None:
    for (name, accuracy), line in zip(experiment.sweep.items(), _LINES, strict=True):
        axes.plot(list(accuracy), list(accuracy.values()), marker="o", markersize=4, label=name, **line)
    axes.axvline(experiment.settings.weight, color="#666666", linewidth=0.8, label="the left panels")
    axes.set(xscale="log", ylim=(0.0, 1.02), ylabel="test accuracy", title="How small a loss survives")
    axes.set_xlabel("weight of the loss")
    axes.invert_xaxis()
    axes.legend(loc="lower left")


def _smoothed(values: list[float]) -> Any:
    window = min(_SMOOTHING, len(values))
    return np.convolve(values, np.ones(window) / window, mode="valid")
