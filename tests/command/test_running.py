"""How the command is started, and what importing its package brings in, seen from a fresh process."""

import json
import subprocess
import sys

import lossscale
import lossscale_core

HEAVY = {"torch", "jax", "tensorflow", "keras", "click", "rich", "matplotlib", "sklearn", "hypothesis"}


def _python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_importing_the_command_costs_what_the_core_costs():
    """`import lossscale` loads no framework and nothing of the `demo` extra, and knows the version."""
    code = "import sys, json, lossscale; print(json.dumps(sorted(m.partition('.')[0] for m in sys.modules)))"
    assert not set(json.loads(_python("-c", code).stdout)) & HEAVY
    assert lossscale.__version__ == lossscale_core.__version__


def test_python_m_lossscale_is_the_command():
    """`python -m lossscale` prints the command's help."""
    done = _python("-m", "lossscale")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: lossscale ")


def test_python_m_lossscale_core_says_where_the_command_is():
    """One sentence with the line to run instead, arguments included, and status 2."""
    done = _python("-m", "lossscale_core", "policy", "check", "my policy.toml")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "lossscale_core: the command has moved to the package lossscale; "
        "run: python -m lossscale policy check 'my policy.toml'\n"
    )


def test_the_command_without_its_extra_says_what_to_install():
    """One sentence and status 2, no traceback."""
    code = (
        "import sys; sys.modules['click'] = None; sys.argv = ['lossscale', 'demo']; "
        "from lossscale.__main__ import main; main()"
    )
    done = _python("-c", code)
    assert done.returncode == 2
    assert done.stderr == (
        "lossscale: this command needs click, which is not installed; run: pip install 'lossscale[demo]'\n"
    )
