"""`mm2-test show` at work: a capture inspected and printed, or a map of its names."""

from __future__ import annotations

from pathlib import Path

from minimax_tools.capture.run_commands import after_capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.command_line.console import end_command, print_json, print_text
from minimax_tools.dumps.opening import DumpReading, open_source
from minimax_tools.errors import CaptureError
from minimax_tools.machine.streams import write
from reports.captures import capture_record, is_damaged, render_capture
from reports.dumps import map_template_of


def show_run(directory: Path, reading: DumpReading, map_template: bool, as_json: bool) -> None:
    """Print a capture, and end with the exit code of its damage."""
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
