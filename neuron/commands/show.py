"""`mm2-test show`: what a saved run holds, and whether its files are as written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from minimax_tools.command_line.console import Mm2Command, end_command, loading, print_json, print_text
from minimax_tools.command_line.options import CapturePath, output_options, reading_options
from minimax_tools.errors import CaptureError
from minimax_tools.machine.streams import write

if TYPE_CHECKING:
    from minimax_tools.dumps.opening import DumpReading


@click.command("show", cls=Mm2Command, epilog="\b\nExample: mm2-test show mm2-captures/neuron/single_layer_0")
@click.argument("directory", type=CapturePath())
@reading_options()
@click.option("--map-template", is_flag=True, help="Print a --map file of the dump to fill in, and end.")
@output_options
def show_command(directory: Path, reading: DumpReading, map_template: bool, as_json: bool) -> None:
    """Print what a saved run holds: layers, sites, shapes and statistics, and whether its files are as written.

    Exits with 3 if they are not.
    """
    with loading():
        from minimax_tools.capture.run_commands import after_capture
        from minimax_tools.capture.source import inspect_capture
        from minimax_tools.dumps.opening import open_source
        from reports.captures import capture_record, is_damaged, render_capture
        from reports.dumps import map_template_of

    source = open_source(directory, reading)
    if map_template:
        write(map_template_of(source), ends_line=False)
        return
    # A dump of another tool has no description: it lists no digests that its files could be checked against.
    inspection = inspect_capture(source) if source.known_description else None
    has_faults = is_damaged(source, inspection)
    following = () if has_faults else after_capture(source)
    if as_json:
        print_json(capture_record(source, inspection), next_commands=following)
    else:
        print_text(render_capture(source, inspection), next_commands=following)
    if has_faults:
        end_command(CaptureError.exit_code)
