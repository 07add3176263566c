"""`mm2-test check`: what this machine is, what changes numbers on it, and whether a layer fits."""

from __future__ import annotations

from pathlib import Path

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import (
    dtype_option,
    optional_model_option,
    output_options,
    parse_lengths,
)
from minimax_tools.command_line.work import done_by
from neuron.options import backend_option


@click.command("check", cls=Mm2Command, epilog="\b\nExample: mm2-test check --model DIR --seq-len 128,2048")
@optional_model_option
@backend_option
@click.option(
    "--seq-len",
    "seq_lens",
    callback=parse_lengths,
    metavar="128,2048",
    default="128",
    show_default=True,
    help="Row lengths in tokens; the memory of a layer is reported for each.",
)
@click.option(
    "--profile-of",
    type=click.Path(path_type=Path),
    metavar="CAPTURE",
    help="Run made with --profile on this machine. Predicts the time of each length. Default: none.",
)
@dtype_option
@output_options
@done_by("neuron.commands.work.check", "report_machine")
def check_command() -> None:
    """Report what this machine is, what changes numbers on it, and whether a layer fits.

    Without --model, the layer is one of MiniMax-M2's. Exits with 3 if no run can work.
    """
