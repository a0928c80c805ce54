"""The code that a page of the docs shows, to be run by tests."""

import ast
import doctest
import re
import textwrap
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[2]


def code_of(page: str, heading: str, number: int = 0, *, before: bool = False) -> str:
    """Return a block of Python below a heading of a page, without the prompts of a doctest.

    Of a diff it is the code that it ends in, or begins with.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    block = _blocks(text, dropped="+" if before else "-")[heading][number]
    if block.lstrip().startswith(">>>"):
        return "".join(example.source for example in doctest.DocTestParser().get_examples(block))
    return block


def _blocks(text: str, dropped: str = "-") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for block in re.finditer(r"^( *)```(python|diff)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
        prose = re.sub(r"^( *)```.*?^\1```", "", text[: block.start()], flags=re.MULTILINE | re.DOTALL)
        above = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
        code = textwrap.dedent(block[3])
        found.setdefault(above[-1], []).append(after_diff(code, dropped) if block[2] == "diff" else code)
    return found


def after_diff(diff: str, dropped: str = "-") -> str:
    """Return the code that a diff ends in; without the lines that begin with `+`, the code that it begins with."""
    lines = [line for line in diff.splitlines(keepends=True) if not line.startswith(dropped)]
    return "".join(line[1:] if line[0] in "+- " else line for line in lines)


def split_loop(source: str, start: str | None = None) -> tuple[CodeType, CodeType]:
    """Return what stands before the last loop of a source, and that loop, made to run over `data`.

    Without a loop, the step begins with the statement that is `start`, or assigns it. `GradScaler` is not imported, but
    left to the caller's names.
    """
    body = ast.parse(source).body
    for each in body:
        if isinstance(each, ast.ImportFrom) and each.module == "lossscale_torch":
            each.names = [alias for alias in each.names if alias.name != "GradScaler"]
    body = [each for each in body if not isinstance(each, ast.ImportFrom) or each.names]
    if start is not None:
        (place,) = (place for place, each in enumerate(body) if start in ast.unparse(each))
        return _compiled(body[:place]), _compiled(body[place:])
    place = max(place for place, each in enumerate(body) if isinstance(each, ast.For))
    loop = body[place]
    loop.iter = ast.copy_location(ast.Name("data", ast.Load()), loop.iter)  # type: ignore[attr-defined]
    return _compiled(body[:place]), _compiled([loop])


def _compiled(statements: list[ast.stmt]) -> CodeType:
    return compile(ast.Module(statements, type_ignores=[]), "<a page of the docs>", "exec")
