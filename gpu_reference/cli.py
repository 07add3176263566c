"""The command `mm2-gpu`: golden captures with transformers, on GPUs or the CPU."""

from __future__ import annotations

import click

from minimax_tools.command_line.group import Mm2Group


@click.group(
    cls=Mm2Group,
    epilog="\b\nExample: mm2-gpu extract-all --model MiniMaxAI/MiniMax-M2 --max-memory 40GB",
)
def main() -> None:
    """Make golden captures of a MiniMax-M2 with transformers' own model."""


main.add_section(
    "Make a golden",
    "gpu_reference.commands",
    {"extract-all": "capture", "full": "capture", "single-layer": "capture", "multi-layer": "capture"},
)
main.add_section(
    "Use a golden",
    "gpu_reference.commands",
    {"certify": "certify", "show": "show", "export": "export", "publish": "publish"},
)
main.add_section("Prepare", "gpu_reference.commands", {"check": "check"})
