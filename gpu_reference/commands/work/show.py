"""`mm2-gpu show` at work: a capture inspected and printed."""

from __future__ import annotations

from pathlib import Path

from gpu_reference.commands.work.golden_run import print_golden
from minimax_tools.capture.passes import Generation
from minimax_tools.capture.run_commands import after_capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.command_line.console import end_command
from minimax_tools.dumps.opening import DumpReading, open_source
from minimax_tools.errors import CaptureError
from reports.captures import capture_record, is_damaged, render_capture


def show_golden(directory: Path, reading: DumpReading, as_json: bool) -> None:
    """Print a capture, and end with the exit code of its damage."""
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
