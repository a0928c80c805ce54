"""The subcommand `lossscale policy`: check, show and convert policy files."""

import json
from pathlib import Path

import click
from rich.table import Table

from lossscale.cli._foreign_files import read_config
from lossscale.cli._shared import FILE, console, example, help_if_alone, require_new, warnings_as_lines
from lossscale_core import dialects, load_policy, policy_schema, policy_to_dict
from lossscale_core._config import policy_as_text, policy_to_toml
from lossscale_core._files import write_whole
from lossscale_core._settings import rules_of


@click.group("policy", epilog=example("lossscale policy check policy.toml"), invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Check, show and convert policy files."""
    help_if_alone(context)


@command.command(epilog=example("lossscale policy check policy.toml"))
@click.argument("file", type=FILE)
def check(file: Path) -> None:
    """Check that FILE holds a valid policy."""
    kind = policy_to_dict(load_policy(file))["kind"]
    click.echo(f"{file}: a valid policy of kind {kind!r}")


@command.command(epilog=example("lossscale policy show policy.toml"))
@click.argument("file", type=FILE)
def show(file: Path) -> None:
    """Show every setting of the policy in FILE, defaults included, with its rule."""
    scaling = load_policy(file)
    table = Table("setting", "value", "rule", title=f"{file}: {type(scaling).__name__}")
    for field, rule in rules_of(scaling):
        table.add_row(field.name, str(getattr(scaling, field.name)), rule.text)
    console().print(table)


@command.command(epilog=example("lossscale policy schema lossscale-policy.schema.json"))
@click.argument("file", type=FILE, required=False)
def schema(file: Path | None) -> None:
    """Write the JSON Schema of policy files to a new FILE, or print it."""
    text = json.dumps(policy_schema())
    if file is None:
        click.echo(text)
    else:
        require_new(file)
        write_whole(file, text + "\n")
        click.echo(f"wrote {file}")


@command.command(epilog=example("lossscale policy convert --from deepspeed ds_config.json --to policy.toml"))
@click.argument("file", type=FILE)
@click.option("--from", "peer", required=True, metavar="TOOL", help="The tool that reads the config; see below.")
@click.option("--to", "out", type=FILE, help="A new .toml or .json file for the policy; printed when left out.")
def convert(file: Path, peer: str, out: Path | None) -> None:
    """Turn another tool's config, in JSON or TOML, into a policy file.

    TOOL is torch, torch-sharded, accelerate, apex, apex-fp16-utils, apex-hysteresis, deepspeed (the fp16 block, or the
    JSON that holds it), megatron, megatron-v1, fairseq, colossalai, keras, keras-experimental, keras3, tf-v1,
    tf-contrib, jmp, flax, paddle, paddle-static or mindspore. Warnings about bugs of the tool go to stderr.
    """
    require_new(out)
    with warnings_as_lines():
        scaling = dialects.from_peer(peer, read_config(file))
    if out is None:
        click.echo(policy_to_toml(scaling), nl=False)
    else:
        write_whole(out, policy_as_text(scaling, out))
        click.echo(f"wrote {out}: a policy of kind {policy_to_dict(scaling)['kind']!r}")
