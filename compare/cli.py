"""The command `mm2-compare`: judges a device run against a golden from their captures alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compare.limits.tolerances import CALIBRATION
from compare.options import NamedSides, criteria_options, layers_options, report_option, sides_options
from minimax_tools.command_line.console import (
    Mm2Command,
    end_command,
    loading,
    print_json,
    print_then_report,
    version_option,
)
from minimax_tools.command_line.options import SUMMARY_JSON, judging_output_options
from minimax_tools.machine.streams import write

if TYPE_CHECKING:
    from compare.limits.criteria import Criteria


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
def main(
    sides: NamedSides,
    layer_pattern: str | None,
    model: str | None,
    criteria: Criteria,
    shows_metrics: bool,
    is_verbose: bool,
    report_path: Path | None,
    as_json: str | None,
) -> None:
    """Judge a port's run against a golden: where they differ, and who is to blame.

    Example: mm2-compare --layer-pattern 'layer_*'
    """
    with loading():
        from compare.comparer import judge_run
        from compare.next_commands import after_comparison
        from compare.run_report import report_run
        from compare.sides.golden_weights import find_weights
        from minimax_tools.capture.run_commands import RunCommands
        from reports.data import comparison_record, summary_record
        from reports.terminal import render_comparison

    reference, target = sides.open()
    weights = find_weights(model, reference, target)
    run = judge_run(
        reference,
        target,
        criteria=criteria,
        layer_pattern=layer_pattern or "layer_*",
        weights=weights,
    )
    comparison = run.comparison
    commands = RunCommands.of(
        reference, target, model=None if weights is None else weights.model, reading=sides.reading_arguments
    )
    following = after_comparison(comparison, commands)
    report = partial(report_run, run, report_path, next_commands=following) if report_path else None
    if as_json:
        record = summary_record(comparison) if as_json == SUMMARY_JSON else comparison_record(comparison)
        print_json(record, next_commands=following)
        if report:
            report()
    else:
        text = render_comparison(comparison, shows_metrics=shows_metrics, is_verbose=is_verbose)
        print_then_report(text, report, next_commands=following)
    end_command(comparison.verdict.exit_code)
