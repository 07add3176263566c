"""The command `mm2-test`: runs a port's layers on a device and, with a golden, judges them."""

from __future__ import annotations

import click

from minimax_tools.command_line.group import Mm2Group


@click.group(
    cls=Mm2Group,
    epilog="\b\nExample: mm2-test sweep --model DIR --golden GOLDEN --target port.py:DecoderLayer",
)
def main() -> None:
    """Run layers of a MiniMax-M2 port on a device, from a golden's inputs, and judge them."""


main.add_section(
    "Find what is wrong",
    "neuron.commands",
    {
        "port": "port",
        "sweep": "run",
        "weights": "weights",
        "bisect": "bisect_layers",
        "replacement": "replacement",
    },
)
main.add_section(
    "Run layers",
    "neuron.commands",
    {"single-layer": "run", "multi-layer": "run", "component": "run", "full": "run"},
)
main.add_section("Run a whole port", "neuron.commands", {"model": "model", "prompts": "prompts"})
main.add_section("Prepare and look", "neuron.commands", {"check": "check", "trace": "trace", "show": "show"})
