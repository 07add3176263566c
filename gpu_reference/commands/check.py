"""`mm2-gpu check`: this machine, or one that is described: what is wrong with it, and which options make a golden."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import (
    captures_option,
    dtype_option,
    optional_model_option,
    output_options,
    parse_lengths,
    parse_size_option,
)
from minimax_tools.command_line.work import done_by


@click.command(
    "check",
    cls=Mm2Command,
    epilog="\b\nExample: mm2-gpu check --model MiniMaxAI/MiniMax-M2\n"
    "Before renting: mm2-gpu check --gpus 8x80GB --memory 1TB",
)
@optional_model_option
@click.option(
    "--gpus", metavar="8x80GB|24GB|0", help="Describe a machine by its GPUs. Default: this machine."
)
@click.option("--memory", metavar="1TB", help="Memory of the host, with --gpus. Default: 64GB.")
@click.option(
    "--disk-speed",
    callback=parse_size_option,
    metavar="2GB",
    help="Bytes that the disk reads in a second, for the times. Default: measured on the checkpoint, else 1GB.",
)
@click.option(
    "--seq-len",
    "seq_lens",
    callback=parse_lengths,
    metavar="96,61",
    help="Lengths of the golden's rows in tokens. Default: the rows that a golden takes by itself.",
)
@dtype_option
@captures_option
@output_options
@done_by("gpu_reference.commands.work.check", "report_machine")
def check_command() -> None:
    """Report what this machine is, and which options make a golden on it, with the memory and about the time of each.

    With --gpus it is about a machine that you describe. Without --model the golden is MiniMax-M2's. The last table is
    of usual machines. Exits with 3 if no way works.
    """
