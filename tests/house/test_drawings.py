"""The drawings of the docs: they say what they show, and stand on a page."""

import re
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lossscale_core import DynamicScaling, ScaleState

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
DRAWINGS = sorted({*(DOCS / "images").glob("*.svg")} - {DOCS / "images/logo.svg"})
"""All but the logo, which is an icon."""
NOT_DRAWN = {"init_scale", "max_overflow_streak"}
"""The settings that take no part in an update."""


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_a_drawing_says_what_it_shows(path):
    """It has a title and a description, which a screen reader finds, and stands on a page with words in its place."""
    root = ElementTree.parse(path).getroot()
    assert root.get("role") == "img"
    labels = [element for name in ("title", "desc") for element in root.findall(SVG + name)]
    assert [label.get("id") for label in labels] == root.get("aria-labelledby").split()
    assert all(label.text.strip() for label in labels)
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert re.search(rf"!\[[^]]+\]\(images/{path.name}\)", pages)


def test_the_state_machine_knows_every_setting_of_an_update():
    """It names each setting of `DynamicScaling` that an update reads, and no setting that does not exist."""
    text = "".join(ElementTree.parse(DOCS / "images/state-machine.svg").getroot().itertext())
    settings = {field.name for field in fields(DynamicScaling)}
    words = {*re.findall(r"[a-z_]+", text)}
    assert settings - NOT_DRAWN <= words
    assert {word for word in words if "_" in word} <= settings | {*ScaleState._fields}
