"""The code that a page of the docs shows, to be run by tests."""

import doctest
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK_OR_HEADING = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```|^#+ (.+?)$", re.MULTILINE | re.DOTALL)


def code_of(page: str, heading: str, number: int = 0, *, before: bool = False) -> str:
    """Return a block of Python below a heading of a page, without the prompts of a doctest.

    A diff gives the code after the change, or before it.
    """
    below: dict[str, list[str]] = {}
    title = ""
    for _, language, block, new_title in BLOCK_OR_HEADING.findall((ROOT / page).read_text(encoding="utf-8")):
        title = new_title or title
        code = textwrap.dedent(block)
        if language == "diff":
            lines = code.splitlines(keepends=True)
            code = "".join(line[1:] for line in lines if not line.startswith("+" if before else "-"))
        if language in ("python", "diff"):
            below.setdefault(title, []).append(code)
    code = below[heading][number]
    if code.lstrip().startswith(">>>"):
        return "".join(example.source for example in doctest.DocTestParser().get_examples(code))
    return code
