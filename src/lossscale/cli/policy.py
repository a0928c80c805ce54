"""The subcommand `lossscale policy`: check policy files, and make them from other tools' configs."""

from pathlib import Path

import click

from lossscale.cli._shared import AS_JSON, FILE, OVERWRITE, example, help_if_alone, require_new, say, warnings_as_lines
from lossscale.other_tools import from_tool, tools, tools_of_config
from lossscale_core import ScalingPolicy, dump_policy, load_policy, policy_to_dict
from lossscale_core.adapters import describe, policy_text
from lossscale_core.errors import PolicyError
from lossscale_core.files import read_data


@click.group("policy", epilog=example("lossscale policy check policy.toml"), invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Check policy files, and make them from other tools' configs."""
    help_if_alone(context)


@command.command(epilog=example("lossscale policy check policy.toml"))
@click.argument("file", type=FILE)
@AS_JSON
def check(file: Path, as_json: bool) -> None:
    """Check that FILE, in TOML or JSON, holds a valid policy, and print all its settings."""
    scaling = load_policy(file)
    _print(scaling, as_json)
    say(f"{file}: a valid policy of kind {policy_to_dict(scaling)['kind']!r}")


@command.command(epilog=example("lossscale policy convert ds_config.json --from deepspeed --to policy.toml"))
@click.argument("file", type=FILE)
@click.option("--from", "tool", metavar="TOOL", help="The tool that reads the config; guessed from its keys.")
@click.option("--to", "out", type=FILE, help="A new .toml or .json file for the policy. Without --to, it is printed.")
@OVERWRITE
@AS_JSON
def convert(file: Path, tool: str | None, out: Path | None, overwrite: bool, as_json: bool) -> None:
    """Turn another tool's config FILE, in JSON or TOML, into a policy.

    TOOL is torch (also FSDP and Accelerate), apex, deepspeed, megatron, keras (tf.keras), keras3, jmp, flax or paddle.
    """
    if out is not None:
        require_new(out, overwrite=overwrite)
    config = read_data(file, "policy", PolicyError)
    if not isinstance(config, dict):
        raise PolicyError(f"{file} holds {describe(config)}, but must hold a dict of keys; pass another file")
    if tool is None:
        names = tools_of_config(config)
        if len(names) != 1:
            which = f"{', '.join(names)} have" if names else "no tool has"
            raise click.UsageError(f"{file}: {which} all of these keys; pass --from with one of {', '.join(tools())}")
        (tool,) = names
    with warnings_as_lines():
        scaling = from_tool(tool, config)
    if out is None:
        _print(scaling, as_json)
    else:
        dump_policy(scaling, out, overwrite=overwrite)
    say(f"{file}: the config of {tool} is a policy of kind {policy_to_dict(scaling)['kind']!r}")


def _print(scaling: ScalingPolicy, as_json: bool) -> None:
    """Print all settings of a policy as TOML or JSON."""
    click.echo(policy_text(scaling, ".json" if as_json else ".toml"), nl=False)
