"""The subcommand `lossscale policy`: check, show and convert policy files."""

import ast
import contextlib
import inspect
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from lossscale.cli._shared import (
    AS_JSON,
    FILE,
    console,
    example,
    help_if_alone,
    print_json,
    require_new,
    typed_policy,
    value_text,
    warnings_as_lines,
)
from lossscale.other_tools import from_tool
from lossscale_core import BaseScaling, dump_policy, load_policy, policy_to_dict
from lossscale_core.adapters import read_data, rules_of, suffix_of
from lossscale_core.errors import PolicyError


@click.group("policy", epilog=example("lossscale policy check policy.toml"), invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Check, show and convert policy files."""
    help_if_alone(context)


@command.command(epilog=example("lossscale policy check policy.toml"))
@click.argument("file", type=FILE)
@AS_JSON
def check(file: Path, as_json: bool) -> None:
    """Check that FILE holds a valid policy."""
    try:
        kind = policy_to_dict(load_policy(file))["kind"]
    except PolicyError as error:
        if as_json:
            print_json({"file": str(file), "valid": False, "error": str(error)})
        raise
    if as_json:
        print_json({"file": str(file), "valid": True, "kind": kind})
    else:
        click.echo(f"{file}: a valid policy of kind {kind!r}")


@command.command(
    short_help="Show every setting, its meaning and its allowed values.",
    epilog=example("lossscale policy show policy.toml"),
)
@click.argument("policy")
@AS_JSON
def show(policy: str, as_json: bool) -> None:
    """Show every setting of POLICY, defaults included, with its meaning and its allowed values.

    POLICY is a .toml or .json file, "dynamic", "none" or a number (a fixed scale).
    """
    scaling = typed_policy(policy, "POLICY")
    kind, meanings = policy_to_dict(scaling)["kind"], _meanings(type(scaling))
    allowed = {field.name: rule.text for field, rule in rules_of(type(scaling))}
    settings = {
        name: {"value": value, "meaning": meanings.get(name, ""), "allowed": allowed[name]}
        for name, value in BaseScaling.of(scaling).settings().items()
    }
    if as_json:
        print_json({"policy": policy, "kind": kind, "settings": settings})
        return
    table = Table("setting", "value", "meaning and allowed values", title=f"{policy}: {type(scaling).__name__}")
    table.show_lines = True
    for name, setting in settings.items():
        about = f"{setting['meaning']}\nAllowed: {setting['allowed']}.".lstrip()
        table.add_row(name, value_text(setting["value"]), about)
    console().print(table)


def _meanings(policy_type: type[Any]) -> dict[str, str]:
    """Return the texts below the fields of a policy class and its bases, by field; none without source."""
    found: dict[str, str] = {}
    for base in reversed(policy_type.__mro__):
        # A method has its file. A class has only `__module__`, which is the public module, not the private one.
        # The texts below fields are not kept at run time, so that they are read from the source.
        method = vars(base).get("update")
        with contextlib.suppress(OSError):
            lines = inspect.findsource(method)[0] if inspect.isfunction(method) else []
            for node in ast.parse("".join(lines)).body:
                if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                    found |= dict(_documented_fields(node.body))
    return found


def _documented_fields(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield ast.unparse(field.target), inspect.cleandoc(str(text.value.value)).replace("\n", " ")


@command.command(epilog=example("lossscale policy convert --from deepspeed ds_config.json --to policy.toml"))
@click.argument("file", type=FILE)
@click.option("--from", "tool", required=True, metavar="TOOL", help="The tool that reads the config, as listed above.")
@click.option("--to", "out", type=FILE, help="A new .toml or .json file for the policy; printed when left out.")
def convert(file: Path, tool: str, out: Path | None) -> None:
    """Turn another tool's config, in JSON or TOML, into a policy file.

    TOOL is torch (also FSDP's scaler and Accelerate), apex, deepspeed (the fp16 block, or the JSON that holds it),
    megatron, keras, keras3, jmp, flax or paddle.
    """
    require_new(out)
    with warnings_as_lines():
        scaling = from_tool(tool, _read_config(file))
    if out is None:
        click.echo("\n".join(f"{name} = {json.dumps(value)}" for name, value in policy_to_dict(scaling).items()))
    else:
        dump_policy(scaling, out, overwrite=False)
        click.echo(f"wrote {out}: a policy of kind {policy_to_dict(scaling)['kind']!r}")


def _read_config(path: Path) -> Mapping[str, Any]:
    """Return the dict in another tool's `.json` or `.toml` file."""
    if suffix_of(path) not in (".json", ".toml"):
        raise PolicyError(f"{path} must be a config in JSON (.json) or TOML (.toml); convert it to one of them")
    config = read_data(path, PolicyError)
    if not isinstance(config, Mapping):
        raise PolicyError(f"{path} holds {type(config).__name__}, but must hold a dict of keys; pass another file")
    return config
