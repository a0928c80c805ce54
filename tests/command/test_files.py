"""Files: written whole or not at all, never through a link or over another one unasked; no key twice."""

import stat

import pytest

from lossscale_core import FixedScaling, dump_policy, load_policy
from tests.command.commanding import refused, run

WRITERS = {
    "policy convert": ("policy", "convert", "torch.json", "--to", "out.toml"),
    "plot": ("plot", "t.csv", "-o", "out.png"),
}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a config of another tool and a recorded run."""
    (tmp_path / "torch.json").write_text('{"init_scale": 1024.0, "growth_interval": 5}')
    (tmp_path / "t.csv").write_text("step,scale,overflowed\n0,8.0,False\n1,8.0,True\n")
    return tmp_path


@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
def test_a_failed_write_leaves_no_file(folder, command):
    """A write to a full disk leaves no part of a file, so that the command works once the disk has space."""
    run(*command[:-1], "warm.png" if command[0] == "plot" else "warm.toml", cwd=folder)  # matplotlib writes a cache
    before = sorted(folder.iterdir())
    assert command[-1] in refused(run(*command, cwd=folder, room=29))
    assert sorted(folder.iterdir()) == before
    done = run(*command, cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
def test_an_overwritten_file_keeps_its_permissions(folder, command):
    """An overwritten file keeps its permissions, whatever the umask is."""
    (folder / command[-1]).touch()
    (folder / command[-1]).chmod(0o444)
    assert run(*command, "--overwrite", cwd=folder).returncode == 0
    assert stat.S_IMODE((folder / command[-1]).stat().st_mode) == 0o444


@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
def test_no_write_follows_a_link(folder, command):
    """The command does not write through a link."""
    link = folder / command[-1]
    link.symlink_to(folder / "torch.json")
    before = (folder / "torch.json").read_text()
    assert "exists and is not overwritten" in refused(run(*command, cwd=folder))
    assert link.is_symlink()
    assert (folder / "torch.json").read_text() == before


def test_dump_policy_replaces_a_link(tmp_path):
    """`dump_policy` replaces a link by a file, and does not change the target of the link."""
    target, link = tmp_path / "target.toml", tmp_path / "link.toml"
    dump_policy(FixedScaling(2.0), target)
    link.symlink_to(target)
    dump_policy(FixedScaling(4.0), link)
    assert (load_policy(target), load_policy(link)) == (FixedScaling(2.0), FixedScaling(4.0))
    assert not link.is_symlink()
