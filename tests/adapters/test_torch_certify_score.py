"""Right programs hold and planted bugs are found, as the table of docs/certify.md says."""

import pytest

from tests.adapters.certify_score import (
    BUGS,
    LOOPS,
    MARKS,
    PAGE,
    SCRIPT_BUGS,
    SCRIPT_NAMES,
    SCRIPTS,
    build_of,
    faults,
    run_script,
    tables,
)


@pytest.mark.parametrize("name", LOOPS)
def test_a_right_loop_holds(name):
    """No line is not held."""
    assert not faults(build_of(name))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_a_bug_in_a_loop_is_found(bug):
    """But for one that changes nothing that a check compares."""
    assert bool(faults(build_of(bug.program, bug.old, bug.new))) == bug.is_found


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_right_script_holds(name, tmp_path):
    """Some lines are held, and none is not."""
    done, page = run_script(tmp_path, name)
    assert (done.returncode, page["result"]) == (0, "held"), done.stderr


@pytest.mark.parametrize("bug", SCRIPT_BUGS, ids=lambda bug: bug.what)
def test_a_bug_in_a_script_is_found(bug, tmp_path):
    """The page says not held."""
    _, page = run_script(tmp_path, bug.program, bug.old, bug.new)
    assert page["result"] == "not held"


def test_the_page_shows_this_score():
    """The table that `python -m tests.adapters.certify_score --write` measures is the one that these tests require."""
    loops = [("right", what, "held") for what in LOOPS.values()]
    loops += [("bug", f"{bug.what} ({bug.program})", "found" if bug.is_found else "not found") for bug in BUGS]
    scripts = [("right", what, "held") for what in SCRIPT_NAMES.values()]
    scripts += [("bug", f"{bug.what} ({bug.program})", "found") for bug in SCRIPT_BUGS]
    shown = PAGE.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0]
    assert shown.strip() == tables(loops, scripts).strip()
