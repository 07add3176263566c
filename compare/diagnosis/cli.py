"""The command `mm2-diagnose`: names the known mistakes that explain a port's errors."""

from __future__ import annotations

import click

from compare.options import layers_options, report_option, sides_options
from minimax_tools.command_line.console import Mm2Command, version_option
from minimax_tools.command_line.options import optional_model_option, output_options
from minimax_tools.command_line.work import done_by


@click.command(cls=Mm2Command)
@optional_model_option
@sides_options
@layers_options
@click.option(
    "--mistake",
    "mistakes",
    multiple=True,
    metavar="NAME",
    help="Mistake to try. Repeat for several. Default: all in the catalogue.",
)
@click.option("--list", "lists_catalogue", is_flag=True, help="Print the catalogue of mistakes, and end.")
@click.option(
    "--prove",
    "proves",
    is_flag=True,
    help="Undo each named mistake in the port, and judge its layer again. The port's code is executed.",
)
@click.option(
    "--target",
    "port",
    metavar="PATH.py:NAME|…",
    help="Port to run for --prove, as for mm2-test. Default: the one that the run names.",
)
@report_option
@output_options
@version_option
@done_by("compare.diagnosis.command", "diagnose_sides")
def main() -> None:
    """Name the known mistakes that explain a port's wrong layers.

    The layers that a comparison blames are diagnosed, and the wrong sites outside the layers: embedding, final norm,
    logits. Of layers blamed for the same sites, two that nothing explains are enough: the others are listed. With
    --layer or --layer-pattern the chosen layers are, blamed or not, and sites outside the layers only if
    the choice is all layers of the run.

    With --prove, each named mistake is undone in the port, whose layer is run and judged again. A diagnosis that was
    made before of the same captures is not made again.

    Exits with 0 if none of these differs, with 1 if the port does, whether its mistake is named or not.

    Example: mm2-diagnose --model DIR --golden GOLDEN --run RUN
    """
