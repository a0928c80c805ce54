"""A page for a pull request with the results of checks of loss scaling, as Markdown and as JSON."""

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import NamedTuple

from lossscale_core import __version__
from lossscale_core.adapters import write_whole

_WORDS = {True: "held", False: "not held", None: "not tried"}
_STATUS = {True: 0, False: 1, None: 2}


class Line(NamedTuple):
    """One line of a page."""

    what: str
    """The requirement, as a sentence."""
    held: bool | None
    """True for held, False for not held, None for not tried."""
    reason: str
    """The evidence, or the reason why it was not tried."""


class Certificate(NamedTuple):
    """A page: its lines, and what is needed to repeat it."""

    lines: list[Line]
    about: dict[str, str]
    """The command, the seed and where it ran, in the order in which the page shows them."""

    @property
    def held(self) -> bool | None:
        """False if a line was not held, True if the others held, None if none was tried."""
        tried = {line.held for line in self.lines} - {None}
        return None if not tried else False not in tried

    @property
    def status(self) -> int:
        """The exit status: 0 for held, 1 for not held, 2 for not tried."""
        return _STATUS[self.held]

    def summary(self) -> str:
        """Return the verdict and the numbers of lines in one sentence."""
        counts = [sum(line.held is held for line in self.lines) for held in _WORDS]
        of_each = ", ".join(f"{count} {word}" for count, word in zip(counts, _WORDS.values(), strict=True))
        return f"{_WORDS[self.held]} ({of_each})"

    def markdown(self) -> str:
        """Return the page."""
        rows = [f"| {_WORDS[line.held]} | {_cell(line.what)} | {_cell(line.reason)} |" for line in self.lines]
        about = {**self.about, **_versions()}
        return "\n".join(
            [
                f"# Loss scaling: {self.summary()}",
                "",
                "| result | what is required | how it was found, or why not |",
                "|---|---|---|",
                *rows,
                "",
                *(f"- {name}: {_cell(value)}" for name, value in about.items()),
                "",
            ]
        )

    def json(self) -> str:
        """Return the content of the page as JSON, for other programs."""
        lines = [{"result": _WORDS[line.held], "what": line.what, "reason": line.reason} for line in self.lines]
        content = {"result": _WORDS[self.held], "lines": lines, "about": {**self.about, **_versions()}}
        return json.dumps(content, indent=2) + "\n"

    def write(self, page: Path, overwrite: bool) -> None:
        """Write the page, and the JSON file next to it."""
        write_whole(page, self.markdown(), overwrite=overwrite)
        write_whole(json_of(page), self.json(), overwrite=overwrite)


def json_of(page: Path) -> Path:
    """Return the path of the JSON file next to a page."""
    return page.with_suffix(".json")


def environment_variable(name: str, default: int) -> int:
    """Return the number in an environment variable of a launcher, or `default` if it is not set."""
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else default


def _cell(text: str) -> str:
    """Return a text as the cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


def _versions() -> dict[str, str]:
    versions = {
        "lossscale": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
    }
    for package in ("torch", "accelerate", "lightning", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
