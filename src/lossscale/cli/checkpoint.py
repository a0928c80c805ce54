"""The subcommand `lossscale checkpoint`: show and convert saved scalers of this library and other tools."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

from lossscale.checkpoint_files import read_checkpoint
from lossscale.cli._shared import (
    AS_JSON,
    FILE,
    TOOLS_HELP,
    console,
    example,
    help_if_alone,
    print_json,
    require_new,
    value_text,
    warnings_as_lines,
)
from lossscale.other_tools import state_from_tool, tools_of_checkpoint
from lossscale_core import (
    ScalingPolicy,
    diagnose,
    load_policy,
    policy_from_dict,
    policy_to_dict,
    state_from_dict,
    state_to_dict,
)
from lossscale_core.adapters import shown, shown_names, write_whole

_OPTIONS = (
    click.argument("file", type=FILE),
    click.option(
        "--from",
        "tool",
        metavar="TOOL",
        help=f"The tool that wrote it; guessed when left out. {TOOLS_HELP}",
    ),
    click.option("--policy", "policy_file", type=FILE, help="The policy (.toml or .json) that will continue with it."),
    click.option("--key", help="Where in FILE the scaler is: scaler, or optimizer.grad_scaler."),
)


def _with_options(subcommand: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        subcommand = option(subcommand)
    return subcommand


@click.group(
    "checkpoint",
    short_help="Show and convert saved scalers, also other tools'.",
    epilog=example("lossscale checkpoint show scaler.pt"),
    invoke_without_command=True,
)
@click.pass_context
def command(context: click.Context) -> None:
    """Show and convert saved scalers of this library and other tools."""
    help_if_alone(context)


@command.command(epilog=example("lossscale checkpoint show scaler.pt"))
@_with_options
@AS_JSON
def show(file: Path, tool: str | None, policy_file: Path | None, key: str | None, as_json: bool) -> None:
    """Show the saved scaler in FILE: JSON, or a file of torch.save."""
    found = read_state(file, tool, _loaded(policy_file), key)
    if as_json:
        print_json({"file": str(file), **found.as_dict()})
        return
    click.echo(f"{file}: {found.source}")
    table = Table("field", "value")
    for name, value in found.rows():
        table.add_row(name, value)
    console().print(table)
    if found.diagnosis is not None:
        console().print(found.diagnosis, soft_wrap=True, highlight=False)


@command.command(epilog=example("lossscale checkpoint convert scaler.pt --to state.json"))
@_with_options
@click.option("--to", "out", type=FILE, help="A new .json file for the state; printed when left out.")
def convert(file: Path, tool: str | None, policy_file: Path | None, key: str | None, out: Path | None) -> None:
    """Turn the saved scaler in FILE into the JSON that `state_from_dict` reads in every framework.

    The policy is saved too if --policy names it or the checkpoint contains all of it.
    """
    require_new(out)
    source, state, scaling = read_state(file, tool, _loaded(policy_file), key)
    text = json.dumps(state_to_dict(state, scaling), indent=2)
    if out is None:
        click.echo(text)
    else:
        write_whole(out, text + "\n")
        click.echo(f"wrote {out}: {source}, {'with' if scaling is not None else 'without'} its policy")


class SavedScaler(NamedTuple):
    """The content of a checkpoint file."""

    source: str
    state: Any
    policy: ScalingPolicy | None
    """The policy that is given or saved in the file."""

    @property
    def diagnosis(self) -> str | None:
        """The text of `diagnose`; None without a policy or a number of steps, which other tools do not save."""
        return None if self.policy is None or self.state.steps == 0 else diagnose(self.policy, self.state)

    def as_dict(self) -> dict[str, Any]:
        """Return the content for JSON."""
        policy = None if self.policy is None else policy_to_dict(self.policy)
        return {
            "source": self.source,
            "state": state_to_dict(self.state),
            "policy": policy,
            "diagnosis": self.diagnosis,
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the value of each field of the state and of the policy, as text."""
        for name, value in state_to_dict(self.state).items():
            yield name, value_text(value)
        for name, value in ({} if self.policy is None else policy_to_dict(self.policy)).items():
            yield f"policy: {name}", value_text(value)


def read_state(file: Path, tool: str | None, scaling: ScalingPolicy | None, key: str | None) -> SavedScaler:
    """Return the content of a checkpoint file. Raises `LossScaleError`, `UsageError` and `OSError`."""
    with warnings_as_lines():
        where, saved = read_checkpoint(file, key)
        place = f" at {shown(where)}" if where else ""
        # None of the tools in `dialects` saves a version in the dict of its scaler.
        if tool is None and "version" in saved:
            scaling = _saved_policy(saved) if scaling is None else scaling
            return SavedScaler(f"a state of this library{place}", state_from_dict(saved, scaling), scaling)
        tool = _guessed(file, saved) if tool is None else tool
        state = state_from_tool(tool, saved, scaling)
        return SavedScaler(f"the scaler of {tool}{place}", state, scaling)


def _loaded(policy_file: Path | None) -> ScalingPolicy | None:
    return None if policy_file is None else load_policy(policy_file)


def _saved_policy(saved: Mapping[str, Any]) -> ScalingPolicy | None:
    return policy_from_dict(saved["policy"]) if "policy" in saved else None


def _guessed(file: Path, saved: Mapping[str, Any]) -> str:
    found = tools_of_checkpoint(saved)
    if len(found) == 1:
        return found[0]
    names = f"{', '.join(found)} save these names with different meanings"
    if not found:
        names = f"no known tool saves its scaler under these names: {shown_names(saved) or 'none'}"
    raise click.UsageError(f"{file}: {names}; pass --from TOOL with the tool that saved it")
