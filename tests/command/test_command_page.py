"""The sessions of the command's page, and further sessions, print what stands below each command."""

from pathlib import Path

import pytest

from tests.command.sessions import PAGE, replay, sections

MORE = Path(__file__).with_name("sessions.md")
OF_TORCH = "run"  # tests/adapters/test_torch_run.py runs it
SESSIONS = [(page, name) for page in (PAGE, MORE) for name in sections(page) if name not in ("", OF_TORCH)]


@pytest.mark.parametrize(("page", "section"), SESSIONS, ids=[name for _, name in SESSIONS])
def test_a_session_prints_its_output(page, section, tmp_path, monkeypatch):
    """Each command of a section prints the text below it."""
    monkeypatch.setenv("COLUMNS", "80")
    text = sections(page)[section]
    assert replay(text, tmp_path) == text.count("\n$ ")
