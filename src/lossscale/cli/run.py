"""The subcommand `lossscale run`: run a PyTorch script with this library's scaler in the place of torch's."""

from collections.abc import Callable
from pathlib import Path

import click

from lossscale.cli._shared import FILE, example, parse_policy


@click.command(
    "run",
    epilog=example("lossscale run --policy policy.toml --trace scale.csv train.py --fp16"),
    context_settings={"allow_interspersed_args": False},
)
@click.option("--policy", help="The policy of the run; without it, the settings that the script gives.")
@click.option("--trace", type=FILE, help="A CSV file to which a row per update is added; one file a rank.")
@click.option("-m", "is_module", is_flag=True, help="PROGRAM begins with the name of a module.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(policy: str | None, trace: Path | None, is_module: bool, program: tuple[str, ...]) -> Callable[[], None]:
    """Run a PyTorch script with this library's scaler.

    The script runs unchanged in this process, with another scaler in the place of torch's. PROGRAM is a script, or with
    -m a module, and its arguments. At exit, stderr has a diagnosis. With several processes, run:
    torchrun --nproc-per-node 8 -m lossscale run --trace scale.csv train.py
    """
    scaling = None if policy is None else parse_policy(policy)
    if trace is not None and trace.suffix.lower() != ".csv":
        raise click.UsageError(f"--trace {trace} must end in .csv; pass such a name")
    if not is_module and not Path(program[0]).is_file():
        raise click.UsageError(f"{program[0]} is not a script; pass the path of one, or -m and the name of a module")
    from lossscale import _recording, _script

    _recording.start(scaling, None if trace is None else trace.absolute())

    def execute() -> None:
        try:
            _script.execute(list(program), is_module=is_module)
        except SystemExit as error:
            _recording.RECORDING.ended_by_usage_error = error.code == 2
            raise

    return execute
