"""Every promise of the documents that `lossscale_tf` implements has a test with its number in the name."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1] / "adapters"


def test_every_promise_has_a_test():
    """1 to 99; `test_promises_048_049_...` is a test of two."""
    text = "\n".join(path.read_text() for path in sorted(TESTS.glob("test_tensorflow_*.py")))
    names = re.findall(r"^def test_promises?_((?:\d{3}_)+)\w+\(", text, flags=re.MULTILINE)
    assert {int(number) for name in names for number in name.split("_") if number} == set(range(1, 100))
