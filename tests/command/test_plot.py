"""`lossscale plot`: the pictures of recorded runs, from the file that `lossscale run --trace` writes."""

import re

import pytest

from tests.command.commanding import refused, run

SCALES = [1024.0, 1024.0, 1024.0, 512.0, 512.0, 256.0]
OURS = "step,scale,applied,overflowed,spiked,norm\n" + "".join(
    f"{step},{scale},{step not in (1, 2, 4)},{step in (2, 4)},{step == 1},{1.5 if step != 2 else 'inf'}\n"
    for step, scale in enumerate(SCALES)
)


def _plot(folder, name, content, *options):
    (folder / name).write_text(content)
    done = run("plot", name, "-o", "scale.svg", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, (folder / "scale.svg").read_text()


def test_a_run_is_drawn(tmp_path):
    """The counts stand on the terminal."""
    printed, picture = _plot(tmp_path, "scale.csv", OURS)
    assert printed == "6 steps: 2 overflowed, 1 spiked, 50.0% skipped\nwrote scale.svg\n"
    assert picture.startswith("<?xml")
    assert "<svg" in picture


@pytest.mark.parametrize("norms", [(1.0, 1.2), (1.0, 30.0), (1.0, 1e6), (1.0, 1e30), (0.0, 0.0)])
def test_the_axis_of_the_norms_has_two_numbers_or_more(tmp_path, norms):
    """For norms of one size, of two and of many."""
    rows = "".join(f"{step},1024.0,False,{norms[step % 2]}\n" for step in range(6))
    _, picture = _plot(tmp_path, "t.csv", "step,scale,overflowed,norm\n" + rows)
    axis = picture[picture.index('id="axes_3"') :]
    axis = axis[axis.index('id="matplotlib.axis_') :]
    ticks = re.findall(r'<g id="ytick_\d+">', axis)
    assert 2 <= len(ticks) <= 8


def test_the_picture_has_what_the_file_knows(tmp_path):
    """Overflows, spikes and the norm where they are known."""
    drawn = re.findall(r"<!-- (.+?) -->", _plot(tmp_path, "scale.csv", OURS)[1])
    assert {"loss scale", "overflow", "spike", "skipped (%)", "gradient norm", "infinite", "step"} <= {*drawn}
    rows = "".join(f"{step},{scale},False\n" for step, scale in enumerate(SCALES))
    content = "step,scale,overflowed\n" + rows
    drawn = re.findall(r"<!-- (.+?) -->", _plot(tmp_path, "other.csv", content, "--overwrite")[1])
    assert "gradient norm" not in drawn


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.csv", "", "has no column 'step'; it has nothing"),
        ("t.csv", "step,loss\n0,1\n", "has no column 'scale'; it has step, loss"),
        ("t.csv", "step,scale,overflowed\n0\n", "row 2 has 1 cells, but the first row has 3"),
        ("t.csv", "step,scale,overflowed\n0,nan,True\n1,-3,True\n", "holds no steps with a positive loss scale"),
        ("t.txt", "1", "must be a .csv file, such as lossscale run --trace writes"),
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
