"""The command `mm2-compare`: judges a device run against a golden, from their capture directories alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from compare.comparer import compare_captures
from compare.limits.limits_file import CALIBRATION
from compare.options import criteria_options, read_criteria
from compare.sides.golden_weights import find_weights
from compare.sides.opening import open_named_sides, opening_options
from minimax_tools.capture.store import DEVICE_SIDE, GOLDEN_SIDE, newest_capture
from minimax_tools.command_line.console import Mm2Command, end_command, print_json
from minimax_tools.command_line.options import captures_option, output_options
from minimax_tools.errors import UsageError
from reports.data import comparison_record, write_report
from reports.terminal import render_comparison


def _print_template(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        click.echo(CALIBRATION.read_text(encoding="utf-8"), nl=False)
        context.exit()


@click.command(cls=Mm2Command)
@click.option(
    "--gpu-path", type=click.Path(path_type=Path), help="Golden capture; the newest under --captures."
)
@click.option(
    "--neuron-path", type=click.Path(path_type=Path), help="Device run; the newest under --captures."
)
@click.option("--layer", metavar="layer_0", help="Compare this layer only.")
@click.option("--layer-pattern", metavar="'layer_*'", help="Compare the layers that match; all by default.")
@click.option(
    "--model",
    envvar="MM2_MODEL",
    metavar="FOLDER|HUB_ID",
    help="Checkpoint of the golden; the one that it was made from, if that is on this machine. Needed to judge chained "
    "layers on the port's own input, rerouted tokens, and sites behind a failing one [env: MM2_MODEL].",
)
@captures_option
@opening_options
@criteria_options
@click.option(
    "--criteria-template",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_template,
    help="Print mm2's own limits as a file for --criteria, and end.",
)
@click.option("--report-path", type=click.Path(path_type=Path), help="Folder for JSON and CSV reports.")
@output_options
def main(
    gpu_path: Path | None,
    neuron_path: Path | None,
    layer: str | None,
    layer_pattern: str | None,
    model: str | None,
    captures: Path,
    report_path: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Judge a device run against a golden: where they differ, and who is to blame.

    Example: mm2-compare --layer-pattern 'layer_*'
    """
    if layer is not None and layer_pattern is not None:
        raise UsageError("--layer and --layer-pattern were both given", next_step="Use one of them.")
    golden = gpu_path or newest_capture(captures, GOLDEN_SIDE)
    device = neuron_path or newest_capture(captures, DEVICE_SIDE)
    reference, target = open_named_sides(golden, device, options)
    comparison = compare_captures(
        reference,
        target,
        criteria=read_criteria(options),
        layer_pattern=_as_pattern(layer) if layer is not None else layer_pattern or "layer_*",
        weights=find_weights(model, reference, target),
    )
    written = write_report(comparison, report_path) if report_path else ()
    if as_json:
        print_json(comparison_record(comparison))
    else:
        click.echo(render_comparison(comparison, shows_metrics=options["shows_metrics"]))
        for path in written:
            click.echo(f"written: {path}")
    end_command(comparison.verdict.exit_code)


def _as_pattern(layer: str) -> str:
    """`layer_7`, or just `7`."""
    return f"layer_{layer}" if layer.isdigit() else layer


if __name__ == "__main__":
    main()
