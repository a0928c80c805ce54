"""The subcommand `lossscale plot`: a picture of a recorded run."""

from pathlib import Path

import click

from lossscale.cli._shared import FILE, OVERWRITE, example, require_new, say
from lossscale.cli._trace import read_trace
from lossscale_core.files import write_whole


@click.command("plot", epilog=example("lossscale plot scale.csv -o scale.svg"))
@click.argument("trace", type=FILE)
@click.option("-o", "--output", type=FILE, required=True, help="The picture: .png, .pdf or .svg.")
@OVERWRITE
def command(trace: Path, output: Path, overwrite: bool) -> None:
    """Draw the loss scale of the recorded run TRACE.

    The picture also has the skipped steps and, if it is known, the gradient norm.
    """
    if output.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise click.UsageError(f"-o {output} must end in .png, .pdf or .svg; pass such a name")
    require_new(output, overwrite=overwrite)
    run = read_trace(trace)
    from lossscale.cli._pictures import draw_trace  # imported late: matplotlib takes a second

    write_whole(output, draw_trace(run, output.suffix[1:].lower()), overwrite=overwrite)
    say(f"wrote {output}: {len(run.step)} steps, {int((~run.applied).sum())} of them skipped")
