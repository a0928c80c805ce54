"""`lossscale plot`: a picture of a recorded run."""

from pathlib import Path

import click

from lossscale.cli._run_file import read_run
from lossscale.cli._shared import FILE, OVERWRITE, console, example, require_picture, warnings_as_lines
from lossscale_core.adapters import write_whole


@click.command(
    "plot", short_help="Draw the loss scale of a recorded run.", epilog=example("lossscale plot scale.csv -o scale.svg")
)
@click.argument("trace", type=FILE)
@click.option("-o", "--output", type=FILE, default="scale.svg", show_default=True, help="Where the picture goes.")
@OVERWRITE
def command(trace: Path, output: Path, overwrite: bool) -> None:
    """Draw TRACE: the loss scale, overflows and spikes, the share of skipped steps and the gradient norm.

    TRACE is the CSV file that `lossscale run --trace` wrote.
    """
    with warnings_as_lines():
        run = read_run(trace)
    require_picture(output, "-o", overwrite)
    from lossscale.cli._pictures import as_picture, draw_run, new_figure, summary  # late: matplotlib takes a second

    figure = new_figure(8, 6)
    draw_run(figure, run)
    write_whole(output, as_picture(figure, output.suffix[1:]), overwrite=overwrite)
    terminal = console()
    terminal.print(summary(run), soft_wrap=True, highlight=False)
    terminal.print(f"wrote {output}", soft_wrap=True)
