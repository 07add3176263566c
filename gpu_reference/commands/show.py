"""`mm2-gpu show`: what a capture holds, what was generated, and whether its files are as written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from minimax_tools.command_line.console import Mm2Command, end_command, loading
from minimax_tools.command_line.options import CapturePath, output_options, reading_options
from minimax_tools.errors import CaptureError

if TYPE_CHECKING:
    from minimax_tools.dumps.opening import DumpReading


@click.command(
    "show", cls=Mm2Command, epilog="\b\nExample: mm2-gpu show mm2-captures/gpu_reference/full_model"
)
@click.argument("directory", type=CapturePath())
@reading_options()
@output_options
def show_command(directory: Path, reading: DumpReading, as_json: bool) -> None:
    """Print what a capture holds: layers, sites, shapes and statistics, what was generated, and any damage.

    Exits with 3 where its files are not as they were written.
    """
    with loading():
        from gpu_reference.commands.golden_run import print_golden
        from minimax_tools.capture.passes import Generation
        from minimax_tools.capture.run_commands import after_capture
        from minimax_tools.capture.source import inspect_capture
        from minimax_tools.dumps.opening import open_source
        from reports.captures import capture_record, is_damaged, render_capture

    source = open_source(directory, reading)
    # Another tool's dump has no description, and no digests to inspect its files by.
    inspection = inspect_capture(source) if source.known_description else None
    has_faults = is_damaged(source, inspection)
    print_golden(
        capture_record(source, inspection),
        render_capture(source, inspection),
        Generation.read(directory),
        as_json=as_json,
        next_commands=() if has_faults else after_capture(source),
    )
    if has_faults:
        end_command(CaptureError.exit_code)
