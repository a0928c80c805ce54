"""Regenerate the tables of a page: `python -m lossscale_core.dialects docs/migrating.md`."""

import sys
from pathlib import Path

from lossscale_core._files import write_whole
from lossscale_core.dialects import tables

MARK = "<!-- drawn by python -m lossscale_core.dialects docs/migrating.md -->\n"

if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_whole(page, page.read_text(encoding="utf-8").partition(MARK)[0] + MARK + tables(), overwrite=True)
