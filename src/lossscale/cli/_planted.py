"""The page of a script that ran with planned overflows: its processes leave findings, which are merged here."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from lossscale import tracing
from lossscale._certificate import Certificate, Line, json_of

_RESUMED = "a resumed run begins with the scale and the counters that were saved"
_NO_SCALER = "no process made a scaler of torch's, or each ended before it could say what it found"


def plant(
    arguments: list[str],
    numbers: list[int],
    page: Path,
    config: Any,
    trace: Path | None,
    resume: str | None,
    repeat: str,
) -> int:
    """Run a program with planned overflows, and write the page.

    Args:
        arguments: The program and its arguments.
        numbers: The numbers of the updates with losses that are made infinite; the first update has the number 0.
        page: The page to write; an existing file is replaced.
        config: The policy of the run as a dict; None keeps the settings that the script gives to its scaler.
        trace: The CSV file of `lossscale run`; None writes none.
        resume: The command that continues from what the program has saved, if any.
        repeat: The command that repeats all of this.

    Returns:
        The exit status of the program if it is not 0, else that of the certificate.
    """
    status, findings = _run(arguments, numbers, config, trace)
    lines = list(_merged(findings)) or [Line("planned overflows are skipped", None, _NO_SCALER)]
    if status:
        lines.append(Line("the script ends with exit status 0", False, f"it ended with {status}"))
    if resume is not None:
        lines.append(
            _resumed(findings, resume, config) if status == 0 else Line(_RESUMED, None, "the first run failed")
        )
    about = {"repeat it with": f"`{repeat}`", "seed": "the script's own", "exit status of the script": str(status)}
    if findings:
        about.update(device=findings[0]["device"], ranks=str(len({each["rank"] for each in findings})))
    certificate = Certificate(lines, about)
    certificate.write(page, overwrite=True)
    click.echo(f"lossscale: {certificate.summary()}; wrote {page} and {json_of(page)}", err=True)
    for line in certificate.lines:
        if line.held is False:
            click.echo(f"lossscale: not held: {line.what}: {line.reason}", err=True)
    return status or certificate.status


def _run(arguments: list[str], numbers: list[int], config: Any, trace: Path | None) -> tuple[int, list[dict[str, Any]]]:
    """Run a program to its end; return its exit status as a shell does, and what its scalers found."""
    with tempfile.TemporaryDirectory(prefix="lossscale-") as folder:
        environment = tracing.environment(config, trace, numbers, Path(folder))
        process = subprocess.Popen(arguments, env=environment)
        # A scheduler ends this process by a signal, which the script may handle; a terminal sends Ctrl-C to both.
        handlers = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        }
        try:
            status = process.wait()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        files = sorted(Path(folder).iterdir())
        return status if status >= 0 else 128 - status, [json.loads(each.read_text("utf-8")) for each in files]


def _merged(findings: list[dict[str, Any]]) -> Iterator[Line]:
    """Yield each line once: not held if it is not on any rank, and held if it is on one and was not tried on others."""
    several = len(findings) > 1
    reasons = [(_place(number, each), each["why_not"]) for number, each in enumerate(findings, 1)]
    untried = [f"{place}: {why_not}" for place, why_not in reasons if why_not]
    if 0 < len(untried) < len(findings):
        yield Line("every scaler is tried", None, "; ".join(untried))
    for lines in zip(*(each["lines"] for each in findings), strict=True):
        found = [
            Line(what, held, f"{_place(number, each)}: {reason}" if several else reason)
            for number, ((what, held, reason), each) in enumerate(zip(lines, findings, strict=True), 1)
            if not each["why_not"] or len(untried) == len(findings)
        ]
        yield min(found, key=lambda line: (False, True, None).index(line.held))
    ranks, expected = len({each["rank"] for each in findings}), max((each["ranks"] for each in findings), default=0)
    if ranks < expected:
        yield Line(
            "every rank says what it found", None, f"{ranks} of {expected} ranks; others were killed, or ran elsewhere"
        )


def _place(number: int, found: dict[str, Any]) -> str:
    return f"rank {found['rank']}" if found["ranks"] > 1 else f"scaler {number}"


def _resumed(findings: list[dict[str, Any]], resume: str, config: Any) -> Line:
    """Run the command that resumes, and compare its scalers' first numbers with those in the files that it has loaded.

    If it has loaded none of the files with a scaler's numbers, they are compared with the newest.
    """
    arguments = shlex.split(resume)
    saved = [numbers for each in findings for numbers in each["saved"].values()]
    if not saved:
        return Line(_RESUMED, None, "no file had the scaler's numbers")
    place = shutil.which(arguments[0]) if arguments else None
    if place is None:
        return Line(_RESUMED, None, f"{resume} is not a command that can be run")
    status, again = _run([place, *arguments[1:]], [], config, None)
    begun_with = [each["begun_with"] for each in again if each["begun_with"] is not None]
    if status or not begun_with:
        return Line(_RESUMED, None, f"`{resume}` ended with status {status}" if status else "it scaled no loss")
    loaded = {path for each in again for path in each["loaded"]}
    read = [numbers for each in findings for path, numbers in each["saved"].items() if path in loaded]
    saved = read or [[*each["saved"].values()][-1] for each in findings if each["saved"]]
    if all(each in saved for each in begun_with):
        return Line(_RESUMED, True, f"`{resume}`: {_text(begun_with[0])}")
    # Those of torch's format are there once more under other names.
    kept = {name: value for name, value in saved[-1].items() if name != "scale" and not name.startswith("_")}
    names = [name for name, value in kept.items() if begun_with[0].get(name) != value]
    differing = ", ".join(f"{name} is {begun_with[0].get(name)} and not {saved[-1][name]}" for name in names)
    return Line(_RESUMED, False, f"`{resume}`: {differing or 'another rank differs'}; load the scaler's state, too")


def _text(numbers: dict[str, Any]) -> str:
    return ", ".join(f"{name} {numbers[name]:g}" for name in ("scale", "_growth_tracker", "steps") if name in numbers)


def as_numbers(text: str | None) -> list[int]:
    """Return the numbers of updates in an option such as 3,4."""
    parts = (text or "").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise click.UsageError(f"--plant {text} must list numbers of updates from 0 on; pass some such as 3,4")
    return sorted({int(part) for part in parts})


def as_command(arguments: tuple[str, ...], text: str, page: Path, resume: str | None) -> str:
    """Return the command that repeats a run, without its folder names."""
    options = ["--plant", text, "--page", os.fspath(page), "--overwrite", *(["--resume", resume] if resume else [])]
    return shlex.join(["lossscale", "run", *options, "--", *arguments])
