"""`docs/tensorflow-promises.md` has a row for every promise, and names the tests with its number in their names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tensorflow-promises.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", PAGE, flags=re.MULTILINE)
TESTS = "\n".join(path.read_text() for path in sorted(ROOT.glob("tests/adapters/test_tensorflow_*.py")))


def test_every_promise_has_a_row():
    """1 to 99, in order, each with words."""
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 100))
    assert all(promise.strip() for _, promise, _ in ROWS)


def test_every_row_names_its_tests():
    """All tests with its number in their names, and no others."""
    defined = re.findall(r"^def (test_promises?_[\d_]*\d_\w+)\(", TESTS, flags=re.MULTILINE)
    for number, _, cell in ROWS:
        named = re.findall(r"`(\w+)`", cell)
        assert named, number
        assert named == [test for test in defined if f"_{int(number):03d}_" in test], number


def test_other_names_on_the_page_are_there():
    """The files, and the test of the documents' examples."""
    for path in re.findall(r"`(tests/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).exists(), path
    assert "def test_the_documents_examples(" in TESTS
