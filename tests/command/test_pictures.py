"""The pictures: their text is inside the figure and large enough, and the committed one is what the code draws."""

import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.text import Text

from lossscale.cli._pictures import draw_run, draw_scale, experiment_as_png, experiment_figure, new_figure
from lossscale.cli._run_file import RecordedRun
from lossscale.demo import DEFAULT_POLICY, DEFAULT_WEIGHT, Settings, run_experiment

DOCS = Path(__file__).parents[2] / "docs"
COMMITTED = DOCS / "images/demo.png"
PAGE = 800
"""The width in pixels of a picture on a page."""


@pytest.fixture(scope="module")
def experiment():
    """Return the demo's results with its default settings."""
    settings = Settings(DEFAULT_POLICY, DEFAULT_WEIGHT, 0, 300)
    return run_experiment(settings, lambda name, total: lambda: None)


def _recorded():
    steps, scale = np.arange(400), 2.0 ** (16 + np.arange(400) // 40)
    norm = np.geomspace(1e-6, 1e6, 400)
    norm[[30, 31]] = np.inf, np.nan
    return RecordedRun(steps, scale, steps % 50 == 49, steps == 7, norm)


def _run():
    figure = new_figure(9, 6)
    draw_run(figure, _recorded())
    return figure


def _simulation():
    figure = new_figure(8, 4)
    draw_scale(figure.subplots(), _recorded().scale, _recorded().overflowed, "loss scale", color="#0072b2")
    return figure


def _is_inside(figure):
    """Return whether all that is drawn, ticks and legends included, lies inside of the figure."""
    figure.draw_without_rendering()
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= height


def test_a_label_that_is_cut_off_is_found():
    """Such as the one that was too long for the demo's third panel."""
    figure = new_figure(4, 3)
    figure.subplots().set_xlabel("much too long " * 9)
    assert not _is_inside(figure)


@pytest.mark.parametrize("draw", [_run, _simulation])
def test_every_text_of_a_run_is_inside_its_figure(draw):
    """Titles, labels, ticks and legends."""
    assert _is_inside(draw())


def test_every_text_of_the_demo_is_inside_its_figure_and_readable(experiment):
    """At least 9 pixels high where the picture is as wide as a page."""
    figure = experiment_figure(experiment)
    assert _is_inside(figure)
    texts = [each for each in figure.findobj(Text) if each.get_text().strip()]
    assert min(each.get_fontsize() / 72 / figure.get_size_inches()[0] * PAGE for each in texts) >= 9.0


def test_a_regime_has_the_same_line_in_every_panel(experiment):
    """Colour and style mean one thing."""
    found = {}
    for axes in experiment_figure(experiment).axes:
        for line in axes.lines:
            if line.get_label().startswith("float"):
                found.setdefault(line.get_label(), set()).add((line.get_color(), line.get_linestyle()))
    assert len(found) == 4
    assert all(len(each) == 1 for each in found.values()), found


def test_infinite_norms_are_marked():
    """At the upper edge, with an entry of the legend; few ticks. NaN is an unknown norm."""
    axes = _run().axes[-1]
    (marks,) = [line for line in axes.lines if line.get_label() == "infinite"]
    assert marks.get_xdata().tolist() == [30]
    assert len(axes.get_yticks()) <= 8


def test_the_committed_picture_is_the_one_that_the_demo_draws(experiment, tmp_path):
    """Pixel by pixel, but for the last bits of another machine's sums."""
    (tmp_path / "demo.png").write_bytes(experiment_as_png(experiment))
    committed, drawn = (matplotlib.image.imread(path) for path in (COMMITTED, tmp_path / "demo.png"))
    assert committed.shape == drawn.shape
    assert (np.abs(committed - drawn).max(axis=-1) > 0.25).mean() < 0.01


def test_on_a_phone_the_picture_is_cut_where_it_is_blank():
    """The stylesheet names its size and the two columns; the title above is in the middle part."""
    style = (DOCS / "stylesheets/site.css").read_text(encoding="utf-8")
    (numbers,) = re.findall(r"is\n +(\d+) x (\d+) px; the cuts at (\d+) and (\d+) px", style)
    width, height, first, second = map(int, numbers)
    picture = matplotlib.image.imread(COMMITTED)[..., :3]
    assert picture.shape[:2] == (height, width)
    assert (picture[:, [first, second]] > 0.95).all()
    assert f"{first} / {height}" in style
    assert f"{second - first} / {height}" in style
    assert f"{width - second} / {height}" in style
