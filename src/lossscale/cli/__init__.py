"""The `lossscale` command: demo, simulator, runs of scripts, pictures, and conversion of policies and files.

The command needs the `cli` extra, its pictures need `plot`, and its demo needs `demo`. For invalid input it prints one
sentence and exits with status 2. Each subcommand is a module of this package that is listed in `_SUBCOMMANDS`.
"""

import importlib
import io
import os
import sys

import click

from lossscale._versions import versions
from lossscale.cli import checkpoint, demo, plot, policy, run_script, simulate
from lossscale.cli._shared import example, help_if_alone
from lossscale_core.adapters import escaped
from lossscale_core.errors import LossScaleError

_SUBCOMMANDS = (demo, simulate, run_script, plot, policy, checkpoint)


def _print_versions(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo(versions())
        context.exit()


@click.group(
    epilog=example("lossscale demo"),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_versions,
    help="Print the versions of lossscale, Python and the installed frameworks.",
)
@click.option(
    "--import", "modules", multiple=True, metavar="MODULE", help="Import MODULE first: it has a policy of your own."
)
@click.pass_context
def command(context: click.Context, modules: tuple[str, ...]) -> None:
    """Loss scaling for float16 training: a demo, a simulator, runs of scripts, pictures, policies and checkpoints."""
    if modules:
        sys.path.append(os.getcwd())  # at the end, so that no file in this folder replaces one of Python's own modules
    for module in modules:
        _import(module)
    help_if_alone(context)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a module of the user's may raise anything, and may end the process
        raise click.UsageError(
            f"--import {module}: {type(error).__name__}: {error}; name a module here, or one that is installed"
        ) from error


for _module in _SUBCOMMANDS:
    command.add_command(_module.command)


def run(arguments: list[str] | None = None) -> None:
    """Run the command and exit.

    Args:
        arguments: The arguments of the command; `sys.argv` if left out.

    Raises:
        SystemExit: The command is done.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without × and – in its encoding must not fail
    try:
        sys.exit(command.main(arguments, prog_name="lossscale", standalone_mode=False))
    except click.Abort:
        _fail("stopped", status=130)
    except click.ClickException as error:
        _fail(error.format_message())
    except LossScaleError as error:
        _fail(str(error))
    except (RecursionError, MemoryError) as error:
        _fail(
            f"the content of the file is too large or nested too deeply ({type(error).__name__}); pass a smaller file"
        )
    except FileNotFoundError as error:
        has_folder = os.path.isdir(os.path.dirname(os.fspath(error.filename or "")) or ".")
        hint = "pass the path of a file that exists" if has_folder else "make its folder first, or pass another path"
        cause = error.strerror if ";" in str(error.strerror) else f"{error.strerror}; {hint}"
        _fail(f"{error.filename}: {cause}" if error.filename else str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _fail(message: str, status: int = 2) -> None:
    click.echo(f"lossscale: {escaped(message)}", err=True)  # it may name a file, under any name
    sys.exit(status)
