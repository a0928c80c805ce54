"""Each line of a recipe that uses a scaler stands in a file that `nox -s typing` checks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.M | re.S)


def _lines(text: str) -> set[str]:
    return {line.split("  #")[0].strip() for line in text.splitlines()}


def test_the_recipes_of_trainers_are_typed():
    """A line that mypy or pyright would refuse in a user's file is found before a user has it."""
    recipes = "".join(block for _, block in BLOCK.findall((ROOT / "docs/trainers.md").read_text()))
    uses = {line for line in _lines(recipes) if re.search(r"scaler|last_step|\.applied", line)}
    uses = {line for line in uses if not re.search(r"\bimport |^def ", line)}
    assert len(uses) > 20
    assert uses - _lines((ROOT / "tests/typing/user_torch.py").read_text()) == set()
