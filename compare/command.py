"""`mm2-compare` at work: a run judged from captures alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from compare.comparer import judge_run
from compare.limits.criteria import Criteria
from compare.next_commands import after_comparison
from compare.options import NamedSides
from compare.run_report import print_then_report, report_run
from compare.sides.golden_weights import find_weights
from minimax_tools.capture.run_commands import RunCommands
from minimax_tools.command_line.console import end_command, print_json
from minimax_tools.command_line.options import SUMMARY_JSON
from reports.data import comparison_record, summary_record
from reports.terminal import render_comparison


def compare_sides(
    sides: NamedSides,
    layer_pattern: str | None,
    model: str | None,
    criteria: Criteria,
    shows_metrics: bool,
    is_verbose: bool,
    report_path: Path | None,
    as_json: str | None,
) -> None:
    """Judge a run, print, and end with the verdict's exit code."""
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
