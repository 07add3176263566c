"""`mm2-gpu certify`: the check of a finished golden; the result goes into its manifest."""

from __future__ import annotations

import click

from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import (
    captures_option,
    complete_captures,
    optional_model_option,
    output_options,
)
from minimax_tools.command_line.remote_paths import CapturePath
from minimax_tools.command_line.work import done_by


@click.command("certify", cls=Mm2Command, epilog="\b\nExample: mm2-gpu certify --model DIR --golden GOLDEN")
@optional_model_option
@click.option(
    "--golden",
    type=CapturePath(),
    help="Golden capture. Default: the newest under --captures.",
    shell_complete=complete_captures(GOLDEN_SIDE),
)
@captures_option
@output_options
@done_by("gpu_reference.commands.work.certify", "certify")
def certify_command() -> None:
    """Check a finished golden before it is trusted; the result becomes a part of it.

    Checks of the golden alone: digests, NaN and Inf, recorded versions and dtypes, and the width of the norms of q
    and k. Checks with --model: transformers' float32 layers against mm2's own, the choice of experts against the
    checkpoint's float32 bias, and the rotary width against config.json.

    One layer is in memory at a time, with one expert. Checks that could not run are named. Exits with 1 if a check
    failed. Of a golden at a remote address the result is printed, and then put there: you need the right to write.
    """
