"""The files by which others join the project say what the project does."""

import datetime
import re
import tomllib
from pathlib import Path

import pytest

import lossscale_core

ROOT = Path(__file__).parents[2]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
FRAMEWORKS = ["numpy", *(name.removesuffix("-test") for name in GROUPS if name.endswith("-test"))]


def _text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_each_release_in_the_changelog_has_a_date():
    """Unreleased stands first, and each version below it has the day of its release, the newest first."""
    first, *releases = re.findall(r"^## (.+)$", _text("CHANGELOG.md"), flags=re.MULTILINE)
    assert first == "[Unreleased]"
    dates = [datetime.date.fromisoformat(re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\S+)", each)[1]) for each in releases]
    assert dates == sorted(dates, reverse=True)


def test_the_newest_release_in_the_changelog_is_this_version():
    """Which CITATION.cff does not repeat; before the first release the changelog has none."""
    releases = re.findall(r"^## \[(\d.+?)\]", _text("CHANGELOG.md"), flags=re.MULTILINE)
    assert releases[:1] in ([], [lossscale_core.__version__])
    assert not re.search(r"^(version|date-released):", _text("CITATION.cff"), flags=re.MULTILINE)


def test_pre_commit_runs_the_linter_of_ci():
    """The pinned ruff of `nox -s lint`, for both of its commands."""
    pins = re.findall(r'additional_dependencies: \["([^"]+)"\]', _text(".pre-commit-config.yaml"))
    assert pins == GROUPS["lint"] * 2


def test_the_public_workflow_runs_sessions_that_exist():
    """Each session that it names is a function of noxfile.py."""
    text = _text(".github/workflows/ci.yml")
    listed = re.findall(r"^ {10}- ([a-z]\S*)$", text, flags=re.MULTILINE)
    asked = {*listed, *re.findall(r"nox -s (\w+)", text)}
    defined = set(re.findall(r"^def ([a-z]\w*)\(session", _text("noxfile.py"), flags=re.MULTILINE))
    assert asked
    assert {re.split(r"[-(]", session)[0] for session in asked} <= defined


def test_the_public_workflow_runs_every_default_session_and_every_nightly_one():
    """What the README's command runs, framework by framework, and what is for the night."""
    text = _text(".github/workflows/ci.yml")
    for session in ("lint", "typing", "conformance", "docs", "build", "mutants"):
        assert f"- {session}\n" in text
    for framework in FRAMEWORKS:
        assert f"- tests(framework='{framework}')\n" in text
        for session in ("oldest", "kaggle", "colab", "newest", "sweep"):
            assert f"- {session}(framework='{framework}')\n" in text
    for framework in ("numpy", "torch", "jax"):
        assert f"- smoke(framework='{framework}')\n" in text


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_the_public_workflows_pin_what_they_use(name):
    """By commit, since a tag can be moved to other code; one of them may publish."""
    used = re.findall(r"uses: (.+)$", _text(f".github/workflows/{name}"), flags=re.MULTILINE)
    assert used
    assert all(re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", each) for each in used)
