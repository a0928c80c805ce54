"""The subcommand `lossscale checkpoint`: show and convert saved scalers of this library and other tools."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from lossscale.cli._foreign_files import read_checkpoint
from lossscale.cli._shared import FILE, console, example, help_if_alone, require_new, scale_text, warnings_as_lines
from lossscale_core import (
    ScalingPolicy,
    diagnose,
    dialects,
    load_policy,
    policy_from_dict,
    policy_to_dict,
    state_from_dict,
    state_to_dict,
)
from lossscale_core._files import write_whole
from lossscale_core._words import shown
from lossscale_core.errors import LossScaleError

_OPTIONS = (
    click.argument("file", type=FILE),
    click.option("--from", "peer", metavar="TOOL", help="Whose checkpoint it is; guessed when left out."),
    click.option("--policy", "policy_file", type=FILE, help="The policy (.toml or .json) that will go on with it."),
    click.option("--key", help="Where in FILE the scaler is: scaler, or optimizer.grad_scaler."),
)


def _with_options(subcommand: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        subcommand = option(subcommand)
    return subcommand


@click.group("checkpoint", epilog=example("lossscale checkpoint show scaler.pt"), invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Show and convert saved scalers of this library and other tools."""
    help_if_alone(context)


@command.command(epilog=example("lossscale checkpoint show scaler.pt"))
@_with_options
def show(file: Path, peer: str | None, policy_file: Path | None, key: str | None) -> None:
    """Show the saved scaler in FILE: JSON, or what torch.save wrote (needs torch 2.10 or later)."""
    source, state, scaling = _read_state(file, peer, policy_file, key)
    click.echo(f"{file}: {source}")
    table = Table("field", "value")
    for name, value in state_to_dict(state).items():
        table.add_row(name, scale_text(value) if name == "loss_scale" else f"{value:g}")
    for name, value in ({} if scaling is None else policy_to_dict(scaling)).items():
        table.add_row(f"policy: {name}", scale_text(value) if name.endswith("_scale") else str(value))
    console().print(table)
    if scaling is not None and state.steps > 0:  # other tools do not save the number of steps
        console().print(diagnose(scaling, state), soft_wrap=True, highlight=False)


@command.command(epilog=example("lossscale checkpoint convert scaler.pt --to state.json"))
@_with_options
@click.option("--to", "out", type=FILE, help="A new .json file for the state; printed when left out.")
def convert(file: Path, peer: str | None, policy_file: Path | None, key: str | None, out: Path | None) -> None:
    """Turn the saved scaler in FILE into the JSON that `state_from_dict` reads in every framework.

    The policy is saved too if --policy names it or the checkpoint contains all of it.
    """
    require_new(out)
    source, state, scaling = _read_state(file, peer, policy_file, key)
    text = json.dumps(state_to_dict(state, scaling), indent=2)
    if out is None:
        click.echo(text)
    else:
        write_whole(out, text + "\n")
        click.echo(f"wrote {out}: {source}, {'with' if scaling is not None else 'without'} its policy")


def _read_state(
    file: Path, peer: str | None, policy_file: Path | None, key: str | None
) -> tuple[str, Any, ScalingPolicy | None]:
    """Return a description of a checkpoint file, its state, and the policy that is given or saved in it."""
    with warnings_as_lines():
        where, saved = read_checkpoint(file, key)
        scaling = None if policy_file is None else load_policy(policy_file)
        place = f" at {shown(where)}" if where else ""
        if peer is None and "version" in saved:
            scaling = _saved_policy(saved) if scaling is None else scaling
            return f"a state of this library{place}", state_from_dict(saved, scaling), scaling
        peer = _guessed(file, saved) if peer is None else peer
        state = dialects.state_from_peer(peer, saved, scaling)
        scaling = dialects.policy_in(peer, saved) if scaling is None else scaling
        return f"the scaler of {peer}{place}", state, scaling


def _saved_policy(saved: Mapping[str, Any]) -> ScalingPolicy | None:
    return policy_from_dict(saved["policy"]) if "policy" in saved else None


def _guessed(file: Path, saved: Mapping[str, Any]) -> str:
    try:
        return dialects.guess_peer(saved)
    except LossScaleError as error:
        raise click.UsageError(f"{file}: {error}; pass --from TOOL, or --key with the place of the scaler") from error
