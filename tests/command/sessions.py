"""The shell sessions of a page: commands behind `$ `, each followed by what it prints."""

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/command.md"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def sections(page=PAGE):
    """Return the text below each heading of the second level; the text before the first is under the empty name."""
    parts = re.split(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], parts[0::2], strict=True))


def replay(text, folder):
    """Write the titled blocks into a folder, run the sessions there, and require the output that the page shows."""
    commands = 0
    for language, title, content in _BLOCK.findall(text):
        if title:
            (folder / title).write_text(content, encoding="utf-8")
        for session in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:] if language == "console" else ():
            command, _, expected = session.partition("\n")
            printed = _printed(command, folder)
            assert doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS), f"$ {command}\n{printed}"
            commands += 1
    return commands


def _printed(command, folder):
    """Return what a command prints on a terminal with 80 columns."""
    own = f"{shlex.quote(sys.executable)} -m lossscale "
    line = re.sub(r"^lossscale ", lambda _: own, command)
    done = subprocess.run(
        line, shell=True, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout
