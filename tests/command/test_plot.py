"""`lossscale plot`: the pictures of recorded runs, from the files in which people have them."""

import json
import re

import numpy as np
import pytest

from tests.command.commanding import refused, run

SCALES = [1024.0, 1024.0, 1024.0, 512.0, 512.0, 256.0]
OURS = "step,scale,applied,overflowed,spiked,norm\n" + "".join(
    f"{step},{scale},{step not in (1, 2, 4)},{step in (2, 4)},{step == 1},{1.5 if step != 2 else 'inf'}\n"
    for step, scale in enumerate(SCALES)
)
WANDB = (
    '"Step","run - _step","run - train/loss_scale","run - train/loss_scale__MIN","run - train/loss","run - words"\n'
    + "".join(f'"{10 * step}","{step}","{scale}","{scale}","","x"\n' for step, scale in enumerate(SCALES))
    + '"60","6","","","0.5","x"\n'
)
DEMO = json.dumps({"loss_scale": SCALES, "overflow": [0, 0, 1, 0, 1, 0], "loss": [1.0] * 6, "seed": 3, "words": ["a"]})
ROWS = json.dumps([{"_step": step, "loss_scale": scale} for step, scale in enumerate(SCALES)])


def _plot(folder, name, content, *options):
    (folder / name).write_text(content)
    done = run("plot", name, "-o", "scale.svg", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, (folder / "scale.svg").read_text()


@pytest.mark.parametrize(
    ("name", "content", "summary"),
    [
        ("scale.csv", OURS, "6 steps: 2 overflowed, 1 spiked, 50.0% skipped"),
        ("wandb.csv", WANDB, "6 rows of 51 steps: 2 overflowed, 33.3% of the rows skipped"),
        ("trace.json", DEMO, "6 steps: 2 overflowed, 33.3% skipped"),
        ("history.json", ROWS, "6 steps: 2 overflowed, 33.3% skipped"),
    ],
)
def test_a_run_is_drawn_from_the_files_people_have(tmp_path, name, content, summary):
    """Ours, an export of Weights & Biases, the demo's and a list of rows; the counts stand on the terminal."""
    printed, picture = _plot(tmp_path, name, content)
    assert printed == f"{summary}\nwrote scale.svg\n"
    assert picture.startswith("<?xml")
    assert "<svg" in picture


def test_a_run_that_was_logged_at_some_steps_has_its_own_share(tmp_path):
    """Rows are not counted as steps; the logged share is that of all steps, and is drawn."""
    rows = "".join(f"{10 * step},{scale},{0.2 / (step + 1)}\n" for step, scale in enumerate(SCALES))
    printed, picture = _plot(tmp_path, "log.csv", "step,loss_scale,overflow_share\n" + rows)
    assert printed.startswith(
        "6 rows of 51 steps: 2 overflowed, 33.3% of the rows skipped; 3.3% of all steps overflowed"
    )
    assert "<!-- share of overflowed steps so far -->" in picture
    whole = "".join(f"{step},{scale},0.2\n" for step, scale in enumerate(SCALES))
    printed, picture = _plot(tmp_path, "whole.csv", "step,loss_scale,overflow_share\n" + whole, "--overwrite")
    assert printed.startswith("6 steps: 2 overflowed, 33.3% skipped")
    assert "<!-- share of skipped steps, mean of the last 9 -->" in picture


@pytest.mark.parametrize("norms", [(1.0, 1.2), (1.0, 30.0), (1.0, 1e6), (1.0, 1e30), (0.0, 0.0)])
def test_the_axis_of_the_norms_has_two_numbers_or_more(tmp_path, norms):
    """For norms of one size, of two and of many."""
    rows = "".join(f"{step},1024.0,{norms[step % 2]}\n" for step in range(6))
    _, picture = _plot(tmp_path, "t.csv", "step,loss_scale,norm\n" + rows)
    axis = picture[picture.index('id="axes_3"') :]
    axis = axis[axis.index('id="matplotlib.axis_') :]
    ticks = re.findall(r'<g id="ytick_\d+">', axis)
    assert 2 <= len(ticks) <= 8


def test_the_picture_has_what_the_file_knows(tmp_path):
    """Overflows, spikes and the norm where they are known; guessed overflows are said to be guessed."""
    drawn = re.findall(r"<!-- (.+?) -->", _plot(tmp_path, "scale.csv", OURS)[1])
    assert {"loss scale", "overflow", "spike", "skipped (%)", "gradient norm", "infinite", "step"} <= {*drawn}
    drawn = re.findall(r"<!-- (.+?) -->", _plot(tmp_path, "wandb.csv", WANDB, "--overwrite")[1])
    assert "overflow (the scale falls after it)" in drawn
    assert "gradient norm" not in drawn


def test_an_event_file_of_tensorboard_is_read_where_tensorboard_is(tmp_path):
    """The folder and the file draw the same; without the package one sentence says what to install."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ModuleNotFoundError:
        (tmp_path / "events.out.tfevents.1").touch()
        assert "pip install tensorboard" in refused(run("plot", "events.out.tfevents.1", cwd=tmp_path))
        return
    writer = EventFileWriter(str(tmp_path / "log"))
    for step, scale in enumerate(SCALES):
        values = [Summary.Value(tag="train/loss_scale", simple_value=scale)]
        if step % 2:
            values.append(Summary.Value(tag="train/grad_norm", simple_value=2.0))
        writer.add_event(Event(step=step, wall_time=0.0, summary=Summary(value=values)))
    writer.close()
    (file,) = (tmp_path / "log").iterdir()
    for number, trace in enumerate((tmp_path / "log", file)):
        done = run("plot", trace, "-o", f"{number}.svg", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("6 steps: 2 overflowed, 33.3% skipped\n")
        assert "gradient norm" in (tmp_path / f"{number}.svg").read_text()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.csv", "", "has no column for the loss scale, such as 'loss_scale'; it has nothing"),
        ("t.csv", "step,loss\n0,1\n", "has no column for the loss scale, such as 'loss_scale'; it has step, loss"),
        ("t.csv", "step,scale\n0\n", "row 2 has 1 cells, but the first row has 2"),
        ("t.csv", "step,scale\n0,nan\n1,-3\n", "holds no steps with a positive loss scale"),
        ("t.json", "[1, 2]", "must hold an object with a list for each column, or a list of objects"),
        ("t.json", "{", "is not valid JSON"),
        ("t.txt", "1", "must be a .csv or .json file, or TensorBoard's event file or folder"),
    ],
)
def test_a_file_that_is_not_a_run_is_refused_in_a_sentence(tmp_path, name, content, said):
    """The sentence names the file and what is wrong with it, and no picture is left."""
    (tmp_path / name).write_text(content)
    message = refused(run("plot", name, cwd=tmp_path))
    assert name in message
    assert said in message
    assert not (tmp_path / "scale.svg").exists()


@pytest.mark.parametrize("name", ["none.csv", "none.json", "none", "none.svg", "none/t.csv"])
def test_a_missing_run_says_what_writes_one(tmp_path, name):
    """Whatever its suffix, it is missing, and that is what the sentence says, also if the picture exists."""
    (tmp_path / "scale.svg").touch()
    sentence = (
        f"lossscale: {name}: No such file or directory; pass a recorded run, such as lossscale run --trace writes\n"
    )
    assert refused(run("plot", name, cwd=tmp_path)) == sentence


def test_nothing_is_overwritten_unasked_and_no_link_is_followed(tmp_path):
    """A picture or a link in its place stays; with --overwrite the link is replaced, and what it led to stays."""
    (tmp_path / "t.csv").write_text(OURS)
    (tmp_path / "other").write_text("kept")
    (tmp_path / "scale.svg").symlink_to("other")
    assert "scale.svg exists and is not overwritten" in refused(run("plot", "t.csv", cwd=tmp_path))
    assert "must end in .png, .pdf, .svg" in refused(run("plot", "t.csv", "-o", "x.jpg", cwd=tmp_path))
    assert "t.csv" in refused(run("plot", "missing/t.csv", "-o", "new.svg", cwd=tmp_path))
    assert run("plot", "t.csv", "--overwrite", cwd=tmp_path).returncode == 0
    assert not (tmp_path / "scale.svg").is_symlink()
    assert (tmp_path / "other").read_text() == "kept"


def test_a_long_run_is_drawn_in_bounded_time(tmp_path):
    """Twenty thousand steps, as a real run has."""
    steps = np.arange(20_000)
    (tmp_path / "t.csv").write_text(
        "step,scale,overflowed\n" + "".join(f"{step},{2.0 ** (10 + step % 3)},{step % 100 == 0}\n" for step in steps)
    )
    done = run("plot", "t.csv", "-o", "t.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("20000 steps: 200 overflowed, 1.0% skipped")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
