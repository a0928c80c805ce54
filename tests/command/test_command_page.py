"""The sessions of the command's page print what the page shows."""

import pytest

from tests.command.sessions import replay, sections

OF_TORCH = "run"  # tests/adapters/test_torch_run.py runs it


@pytest.mark.parametrize("section", [name for name in sections() if name not in ("", OF_TORCH)])
def test_the_sessions_of_the_page_are_real(section, tmp_path, monkeypatch):
    """Each command leaves the output that stands below it."""
    monkeypatch.setenv("COLUMNS", "80")
    text = sections()[section]
    assert replay(text, tmp_path) == text.count("\n$ ")
