"""`mm2-test trace`: compiles one layer of a port into a file for `--target traced:FILE`."""

from __future__ import annotations

from pathlib import Path

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import (
    dtype_option,
    input_options,
    layer_option,
    model_option,
    output_options,
    stack_options,
)
from minimax_tools.command_line.work import done_by
from neuron.devices.backend import Backend
from neuron.options import golden_option, target_option

_BACKENDS = ("auto", str(Backend.NEURON_XLA), str(Backend.CPU))


@click.command(
    "trace",
    cls=Mm2Command,
    epilog="\b\nExample: mm2-test trace --model DIR --layer 0 --golden GOLDEN --target port.py:DecoderLayer "
    "--output layer_0.pt2",
)
@model_option
@layer_option
@target_option
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File to write, as large as the layer's weights.",
)
@golden_option("Golden capture that gives the shape of the rows. Default: none, see --seq-len.")
@click.option(
    "--backend",
    type=click.Choice(_BACKENDS),
    default="auto",
    show_default=True,
    help="Backend to compile for: torch_neuronx.trace for neuron-xla, torch.export for cpu.",
)
@click.option(
    "--check-capture",
    is_flag=True,
    help="Also compile the layer without its sites, and report whether returning them changes its output.",
)
@stack_options(input_options, dtype_option)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random numbers.")
@output_options
@done_by("neuron.commands.work.trace", "trace_to_file")
def trace_command() -> None:
    """Compile one layer into a file for --target traced:FILE, with its sites as further outputs.

    The file holds the weights. The program takes rows of one shape, which --golden or --seq-len gives.
    Loading such a file executes its code, as with a port's own file.
    """
