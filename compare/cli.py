"""The command `mm2-compare`: judges a device run against a golden from their captures alone."""

from __future__ import annotations

import click

from compare.limits.tolerances import CALIBRATION
from compare.options import criteria_options, layers_options, report_option, sides_options
from minimax_tools.command_line.console import Mm2Command, version_option
from minimax_tools.command_line.options import judging_output_options
from minimax_tools.command_line.work import done_by
from minimax_tools.machine.streams import write


def _print_template(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        write(CALIBRATION.read_text(encoding="utf-8"), ends_line=False)
        context.exit()


@click.command(cls=Mm2Command)
@sides_options
@layers_options
@click.option(
    "--model",
    envvar="MM2_MODEL",
    metavar="FOLDER|HUB_ID|s3://…",
    help="Checkpoint of the golden. Needed to judge rerouted tokens, chained layers, and sites downstream of a "
    "failure. Default: the one it was made from, if it is on this machine [env: MM2_MODEL].",
)
@criteria_options
@click.option(
    "--criteria-template",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_template,
    help="Print mm2's own limits as a file for --criteria, and end.",
)
@report_option
@judging_output_options
@version_option
@done_by("compare.command", "compare_sides")
def main() -> None:
    """Judge a port's run against a golden: where they differ, and who is to blame.

    Example: mm2-compare --layer-pattern 'layer_*'
    """
