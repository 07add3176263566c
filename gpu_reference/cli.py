"""The command `mm2-gpu`: golden captures with transformers, on GPUs or the CPU."""

from __future__ import annotations

import click

from gpu_reference.commands.capture import (
    extract_all_command,
    full_command,
    multi_layer_command,
    single_layer_command,
)
from gpu_reference.commands.certify import certify_command
from gpu_reference.commands.check import check_command
from gpu_reference.commands.export import export_command
from gpu_reference.commands.publish import publish_command
from gpu_reference.commands.show import show_command
from minimax_tools.command_line.console import Mm2Group


@click.group(
    cls=Mm2Group,
    epilog="\b\nExample: mm2-gpu extract-all --model MiniMaxAI/MiniMax-M2 --max-memory 40GB --seq-len 96,61",
)
def main() -> None:
    """Make golden captures of a MiniMax-M2 with transformers' own model."""


main.add_section(
    "Make a golden", extract_all_command, full_command, single_layer_command, multi_layer_command
)
main.add_section("Use a golden", certify_command, show_command, export_command, publish_command)
main.add_section("Prepare", check_command)
