"""The command `mm2-test`: runs a port's layers on a device and, with a golden, judges them."""

from __future__ import annotations

from collections.abc import Mapping

import click

from minimax_tools.command_line.group import CommandPlace, Mm2Group

# The file of each command in `neuron.commands`, and the first sentence of its help.
_SECTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Find what is wrong": {
        "port": (
            "port",
            "Judge a port in stages: golden, weights, sweep, then its mistake named and proved, or all layers in a "
            "chain.",
        ),
        "sweep": (
            "run",
            "Run each layer of a range by itself on the golden's input: the usual way to find a fault.",
        ),
        "weights": (
            "weights",
            "Trace where every element of a layer's weights lands in a port, and name what is wrong with it.",
        ),
        "bisect": ("bisect_layers", "Find the first wrong layer by running halves of a range."),
        "replacement": (
            "replacement",
            "Bisect a port that is compiled whole: run it by hand, with the golden's stream in place of its own.",
        ),
    },
    "Run layers": {
        "single-layer": (
            "run",
            "Run one layer; with --undo, prove a mistake in it: undo the mistake, and judge the layer again.",
        ),
        "multi-layer": ("run", "Run a range of layers, each on the output of the layer before."),
        "component": ("run", "Run one component of a layer on the golden's values at its border."),
        "full": (
            "run",
            "Run the whole model from the tokens to the logits, and print what each row generates.",
        ),
    },
    "Run a whole port": {
        "model": (
            "model",
            "Run a whole port: prefill, decoding of the golden's own tokens, chunks, free generation; judge all of it.",
        ),
        "prompts": (
            "prompts",
            "Find the prompts whose next tokens a port predicts otherwise, rank them, and follow the worst to its "
            "layer.",
        ),
    },
    "Prepare and look": {
        "check": (
            "check",
            "Report what this machine is, what changes numbers on it, and whether a layer fits.",
        ),
        "trace": (
            "trace",
            "Compile one layer into a file for --target traced:FILE, with its sites as further outputs.",
        ),
        "show": (
            "show",
            "Print what a saved run holds: layers, sites, shapes and statistics, and whether its files are as written.",
        ),
    },
}


@click.group(
    cls=Mm2Group,
    epilog="\b\nExample: mm2-test sweep --model DIR --golden GOLDEN --target port.py:DecoderLayer",
)
def main() -> None:
    """Run layers of a MiniMax-M2 port on a device, from a golden's inputs, and judge them."""


for _title, _commands in _SECTIONS.items():
    for _name, (_file, _summary) in _commands.items():
        _place = f"neuron.commands.{_file}:{_name.replace('-', '_')}_command"
        main.add_section(_title, CommandPlace(_name, _place, _summary))
