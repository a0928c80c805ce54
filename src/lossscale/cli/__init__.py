"""The `lossscale` command; each subcommand is a module of this package. It needs the `cli` extra, which is click."""

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from lossscale._versions import versions
from lossscale.cli import checkpoint, demo, plot, policy, run, simulate
from lossscale.cli._shared import example, help_if_alone, say
from lossscale_core.errors import LossScaleError


@click.group(
    epilog=example("lossscale demo"),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option("", message=versions(), help="Print the versions of lossscale, Python and the frameworks.")
@click.pass_context
def command(context: click.Context) -> None:
    """Loss scaling for float16 training: a demo, a simulator, runs of scripts, pictures, policies and checkpoints."""
    help_if_alone(context)
    if context.invoked_subcommand != "run" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # so that a terminal with another encoding raises no error


for _module in (demo, simulate, run, plot, policy, checkpoint):
    command.add_command(_module.command)


def parse(arguments: list[str] | None = None) -> Callable[[], None]:
    """Run a subcommand, and return a function that executes the script of `lossscale run`, or does nothing.

    Args:
        arguments: The arguments of the command; `sys.argv` if they are left out.

    Raises:
        SystemExit: The input is invalid. The status is 2, and stderr has one sentence.
    """
    try:
        result: Any = command.main(arguments, prog_name="lossscale", standalone_mode=False)
    except click.Abort:
        say("lossscale: stopped")
        sys.exit(130)
    except click.ClickException as error:
        message = error.format_message()
    except (RecursionError, MemoryError) as error:
        message = f"the content of the file is too large or too nested ({type(error).__name__}); pass a smaller file"
    except OSError as error:
        has_folder = os.path.isdir(os.path.dirname(os.fspath(error.filename or "")) or ".")
        hint = "pass the path of a file that exists" if isinstance(error, FileNotFoundError) else "pass another path"
        cause = f"{error.strerror}; {hint if has_folder else 'make its folder first'}"
        message = f"{error.filename or 'stdout'}: {error.strerror if ';' in str(error.strerror) else cause}"
    except LossScaleError as error:
        message = str(error)
    else:
        return result if callable(result) else lambda: None
    say(f"lossscale: {message}")
    sys.exit(2)
