"""The command `mm2-test`: runs a port's layers on a device and, with a golden, judges them."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Group
from neuron.commands.bisect_layers import bisect_command
from neuron.commands.check import check_command
from neuron.commands.model import model_command
from neuron.commands.port import port_command
from neuron.commands.prompts import prompts_command
from neuron.commands.replacement import replacement_command
from neuron.commands.run import (
    component_command,
    full_command,
    multi_layer_command,
    single_layer_command,
    sweep_command,
)
from neuron.commands.show import show_command
from neuron.commands.trace import trace_command
from neuron.commands.weights import weights_command


@click.group(
    cls=Mm2Group,
    epilog="\b\nExample: mm2-test sweep --model DIR --golden GOLDEN --target port.py:DecoderLayer",
)
def main() -> None:
    """Run layers of a MiniMax-M2 port on a device, from a golden's inputs, and judge them."""


main.add_section(
    "Find what is wrong", port_command, sweep_command, weights_command, bisect_command, replacement_command
)
main.add_section("Run layers", single_layer_command, multi_layer_command, component_command, full_command)
main.add_section("Run a whole port", model_command, prompts_command)
main.add_section("Prepare and look", check_command, trace_command, show_command)
