"""`mm2-split memory`: the bytes of a checkpoint by dtype, and what it takes in memory."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import model_option, output_options
from minimax_tools.command_line.work import done_by


@click.command("memory", cls=Mm2Command, epilog="\b\nExample: mm2-split memory --model MiniMaxAI/MiniMax-M2")
@model_option
@output_options
@done_by("minimax_tools.commands.work.memory", "measure_memory")
def memory_command() -> None:
    """Print what a checkpoint takes: bytes by dtype, each layer and all of it in BF16 and in float32.

    Only headers and config.json are read. The last lines are about ports that stack the experts of a layer: their
    memory, if the stacked weights are held to BF16, and if they are left in float32.
    """
