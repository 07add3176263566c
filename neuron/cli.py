"""The command `mm2-test`: runs a port's layers on a device and, with a golden, judges them."""

from __future__ import annotations

import click

from minimax_tools.command_line.group import CommandPlace, Mm2Group


@click.group(
    cls=Mm2Group,
    epilog="\b\nExample: mm2-test sweep --model DIR --golden GOLDEN --target port.py:DecoderLayer",
)
def main() -> None:
    """Run layers of a MiniMax-M2 port on a device, from a golden's inputs, and judge them."""


main.add_section(
    "Find what is wrong",
    CommandPlace(
        "port",
        "neuron.commands.port",
        "port_command",
        "Judge a port in stages: golden, weights, sweep, then its mistake named and proved, or all layers in a chain.",
    ),
    CommandPlace(
        "sweep",
        "neuron.commands.run",
        "sweep_command",
        "Run each layer of a range by itself on the golden's input: the usual way to find a fault.",
    ),
    CommandPlace(
        "weights",
        "neuron.commands.weights",
        "weights_command",
        "Trace where every element of a layer's weights lands in a port, and name what is wrong with it.",
    ),
    CommandPlace(
        "bisect",
        "neuron.commands.bisect_layers",
        "bisect_command",
        "Find the first wrong layer by running halves of a range.",
    ),
    CommandPlace(
        "replacement",
        "neuron.commands.replacement",
        "replacement_command",
        "Bisect a port that is compiled whole: run it by hand, with the golden's stream in place of its own.",
    ),
)
main.add_section(
    "Run layers",
    CommandPlace(
        "single-layer",
        "neuron.commands.run",
        "single_layer_command",
        "Run one layer; with --undo, prove a mistake in it: undo the mistake, and judge the layer again.",
    ),
    CommandPlace(
        "multi-layer",
        "neuron.commands.run",
        "multi_layer_command",
        "Run a range of layers, each on the output of the layer before.",
    ),
    CommandPlace(
        "component",
        "neuron.commands.run",
        "component_command",
        "Run one component of a layer on the golden's values at its border.",
    ),
    CommandPlace(
        "full",
        "neuron.commands.run",
        "full_command",
        "Run the whole model from the tokens to the logits, and print what each row generates.",
    ),
)
main.add_section(
    "Run a whole port",
    CommandPlace(
        "model",
        "neuron.commands.model",
        "model_command",
        "Run a whole port: prefill, decoding of the golden's own tokens, chunks, free generation; judge all of it.",
    ),
    CommandPlace(
        "prompts",
        "neuron.commands.prompts",
        "prompts_command",
        "Find the prompts whose next tokens a port predicts otherwise, rank them, and follow the worst to its layer.",
    ),
)
main.add_section(
    "Prepare and look",
    CommandPlace(
        "check",
        "neuron.commands.check",
        "check_command",
        "Report what this machine is, what changes numbers on it, and whether a layer fits.",
    ),
    CommandPlace(
        "trace",
        "neuron.commands.trace",
        "trace_command",
        "Compile one layer into a file for --target traced:FILE, with its sites as further outputs.",
    ),
    CommandPlace(
        "show",
        "neuron.commands.show",
        "show_command",
        "Print what a saved run holds: layers, sites, shapes and statistics, and whether its files are as written.",
    ),
)
