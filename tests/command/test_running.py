"""How the command is started, and what importing its package brings in, seen from a new process."""

import subprocess
import sys

import numpy as np
import pytest

import lossscale_core


def _python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_the_command_names_a_missing_extra():
    """Without click the command prints one sentence with the commands that install it, and ends with status 2."""
    done = _python("-c", _without("click", "demo"))
    assert done.returncode == 2
    assert done.stderr == (
        "lossscale: this command needs click, which is not installed; "
        "run: pip install 'lossscale[cli]', or in a clone: pip install '.[cli]'\n"
    )


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_full_output_is_named(option):
    """If the standard output is full, the error names it as `stdout`."""
    done = _python("-c", "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n" + _without("", option))
    assert done.returncode == 2
    assert done.stderr.startswith("lossscale: stdout: No space left on device")
    assert done.stderr.count("\n") == 1


def _without(packages, *arguments):
    """Return a program that runs the command where packages, apart by spaces, are not installed."""
    return (
        f"import sys; sys.modules.update(dict.fromkeys({packages.split()})); sys.argv = ['lossscale', *{arguments}]; "
        "from lossscale.__main__ import main; main()"
    )


def test_the_version_needs_no_extra():
    """`lossscale --version` runs where only the core's requirements are installed, and names the frameworks."""
    done = _python("-c", _without("click matplotlib threadpoolctl", "--version"))
    assert done.stdout.startswith(f"lossscale {lossscale_core.__version__}\npython 3.")
    assert (f"\nnumpy {np.__version__}\n" in done.stdout, done.stderr) == (True, "")


def test_only_pictures_need_more_extras(tmp_path, monkeypatch):
    """Without matplotlib, threadpoolctl and torch the other subcommands work; `plot` names the extra that it needs."""
    (tmp_path / "t.csv").write_text("step,scale,overflowed\n0,8.0,False\n")
    (tmp_path / "torch.json").write_text('{"init_scale": 8.0, "growth_interval": 5}')
    monkeypatch.chdir(tmp_path)
    for arguments in (("policy", "convert", "torch.json"), ("simulate", "dynamic", "t.csv"), ("--help",)):
        done = _python("-c", _without("matplotlib threadpoolctl torch", *arguments))
        assert done.returncode == 0, done.stderr
    done = _python("-c", _without("matplotlib threadpoolctl", "plot", "t.csv", "-o", "s.png"))
    assert done.returncode == 2
    assert "this command needs matplotlib, which is not installed; run: pip install 'lossscale[plot]'" in done.stderr
