"""Require that installed releases are the newest in the table of docs/works-with.md: `nox -s newest` runs this."""

import importlib.metadata
import re
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/works-with.md").read_text(encoding="utf-8")
TITLES, NEWEST = (re.search(rf"^\| {row}.+$", PAGE, re.MULTILINE)[0].split("|") for row in ("session", "`newest`"))
TRIED = {title.strip().lower(): version.strip() for title, version in zip(TITLES, NEWEST, strict=True)}
TRIED["torch"] = TRIED["pytorch"]

for distribution in sys.argv[1:]:
    installed, newest = importlib.metadata.version(distribution), TRIED[distribution.removesuffix("-cpu")]
    if not f"{installed}.".startswith(f"{newest}."):
        sys.exit(
            f"{distribution} {installed} is installed, and {newest} is the newest that was tried; if the tests pass, "
            "write its version in docs/works-with.md"
        )
