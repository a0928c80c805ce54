"""The site's own style keeps words of tables whole."""

import re
from pathlib import Path

CSS = (Path(__file__).parents[2] / "docs/stylesheets/site.css").read_text(encoding="utf-8")


def test_only_code_is_broken_within_a_word():
    """Also on a phone, where a table that is wider than the screen scrolls."""
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", re.sub(r"/\*.*?\*/", "", CSS, flags=re.DOTALL))
    broken = [selector.strip() for selector, style in rules if re.search(r": (?:anywhere|break-\w+)", style)]
    assert broken
    assert [each for each in broken if not each.endswith("code")] == []
