"""Regenerate the tables of the pages on migrating: `python -m lossscale_core.dialects docs/migrating.md`."""

import sys
from pathlib import Path

from lossscale_core.dialects import tables
from lossscale_core.dialects._peers import PAGES
from lossscale_core.files import write_whole

MARK = "<!-- drawn by python -m lossscale_core.dialects docs/migrating.md -->\n"


def draw(path: Path, text: str) -> None:
    """Replace what stands below the mark."""
    write_whole(path, path.read_text(encoding="utf-8").partition(MARK)[0] + MARK + text, overwrite=True)


if __name__ == "__main__":
    overview = Path(sys.argv[1])
    draw(overview, tables())
    for page in PAGES:
        draw(overview.with_suffix("") / f"{page}.md", tables(page))
