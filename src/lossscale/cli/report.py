"""The subcommand `lossscale report`: what to put into a bug report."""

import importlib.metadata
import platform
from collections.abc import Iterator
from pathlib import Path

import click

from lossscale._tried import untried
from lossscale.cli._shared import AS_JSON, FILE, TOOLS_HELP, example, print_json, typed_policy, value_text
from lossscale.cli.checkpoint import SavedScaler, read_state
from lossscale_core import ScalingPolicy, __version__, policy_to_dict

_PACKAGES = (
    *("numpy", "array-api-compat", "torch", "jax", "optax", "flax", "tensorflow", "keras", "tf_keras", "mlx"),
    *("click",),
)
# Other builds of a package have distributions of other names.
_OTHER_NAMES = {"tensorflow": ("tensorflow-cpu", "tensorflow-intel", "tf-nightly")}


@click.command(
    "report",
    short_help="Print what a bug report needs.",
    epilog=example("lossscale report state.json --policy policy.toml"),
)
@click.argument("checkpoint", type=FILE, required=False)
@click.option("--policy", help="The policy: a .toml or .json file, dynamic, none or a number.")
@click.option("--from", "tool", metavar="TOOL", help=f"The tool that wrote the checkpoint. {TOOLS_HELP}")
@click.option("--key", help="Where in CHECKPOINT the scaler is.")
@AS_JSON
def command(checkpoint: Path | None, policy: str | None, tool: str | None, key: str | None, as_json: bool) -> None:
    """Print the versions, the policy, the state and the diagnosis, to paste into a bug report.

    CHECKPOINT is a file with a saved scaler, as in `lossscale checkpoint show`. Versions that are older or newer than
    those that lossscale was tried with are marked. The report holds no data, no weights and no paths.
    """
    scaling = None if policy is None else typed_policy(policy, "--policy")
    saved = None if checkpoint is None else read_state(checkpoint, tool, scaling, key)
    if as_json:
        about = {"policy": None if scaling is None else policy_to_dict(scaling)} if saved is None else saved.as_dict()
        versions = dict(_versions())
        remarks = {name: remark for name, version in versions.items() if (remark := untried(name, version))}
        print_json({"versions": versions, "untried": remarks, **about})
        return
    for name, version in _versions():
        remark = untried(name, version)
        click.echo(f"{name}: {version} ({remark})" if remark else f"{name}: {version}")
    for name, value in _rows(scaling, saved):
        click.echo(f"{name}: {value}")


def _versions() -> Iterator[tuple[str, str]]:
    """Yield the versions of what is installed, without an import of it."""
    yield "lossscale", __version__
    yield "python", platform.python_version()
    yield "platform", platform.platform(terse=True)
    # The metadata is read instead of __version__, since an import of all three frameworks takes some ten seconds.
    for package in _PACKAGES:
        for name in (package, *_OTHER_NAMES.get(package, ())):
            try:
                yield package, importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue


def _rows(scaling: ScalingPolicy | None, saved: SavedScaler | None) -> Iterator[tuple[str, str]]:
    if saved is None:
        settings = {} if scaling is None else policy_to_dict(scaling)
        yield from ((f"policy: {name}", value_text(value)) for name, value in settings.items())
        return
    yield "checkpoint", saved.source
    yield from saved.rows()
    yield "diagnosis", saved.diagnosis or "not known without a policy and a number of steps"
