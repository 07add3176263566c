"""The command `mm2-test weights`: where every element of a layer lands in a port, and whether that is right."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import (
    dtype_option,
    memory_budget_option,
    model_option,
    output_options,
)
from minimax_tools.command_line.work import done_by
from neuron.devices.backend import Backend
from neuron.options import rank_options, target_option


@click.command(
    "weights",
    cls=Mm2Command,
    epilog="\b\nExample: mm2-test weights --model DIR --target port.py:DecoderLayer",
)
@model_option
@target_option
@click.option(
    "--backend",
    type=click.Choice([str(Backend.CPU)]),
    default=str(Backend.CPU),
    show_default=True,
    help="Where the port runs: always the CPU, as conversions run on the host.",
)
@rank_options
@click.option("--layer", type=click.IntRange(min=0), help="Layer number. Default: 0.")
@click.option(
    "--all-layers",
    is_flag=True,
    help="Trace every layer of the model; layers with the same findings are told once.",
)
@click.option(
    "--full-size", is_flag=True, help="Trace a layer of the model's own size instead of a smaller one."
)
@click.option(
    "--load/--no-load",
    "loads",
    default=True,
    show_default=True,
    help="Also load the checkpoint's own layer and compare all values with the checkpoint.",
)
@memory_budget_option
@dtype_option
@output_options
@done_by("neuron.commands.work.weights", "trace_weights")
def weights_command() -> None:
    """Trace where every element of a layer's weights lands in a port, and name what is wrong with it.

    The port's conversion and strict loading get generated tensors whose values encode their own position. They show
    each weight that is missing, duplicated, swapped, transposed, out of order, scaled, computed or rounded.

    Only the port's forward decides which layout is right. So the port is run once on generated weights, in float32 on
    the CPU, beside the reference layer. If the outputs differ, the repair that makes them agree names the mistake.

    Large models are traced at a smaller size. With --full-size, as many experts are traced element by element as fit in
    --memory-budget (default: the machine's free memory), and the report names them. The values of all experts are
    compared once the checkpoint's layer is loaded.

    Exits with 1 if weights are wrong.
    """
