"""The commands of `mm2-test` that run layers: single-layer, multi-layer, sweep, full and component."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import layer_option
from minimax_tools.command_line.work import done_by
from minimax_tools.model.run import Component
from neuron.options import device_options, span_device_options


@click.command(
    "single-layer",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test single-layer --model DIR --layer 0 --golden GOLDEN",
)
@layer_option
@click.option(
    "--undo",
    "mistakes",
    multiple=True,
    metavar="MISTAKE[,PARAMETER=VALUE…]",
    help="Undo a mistake that mm2-diagnose named, and judge the layer again. Repeat for several together.",
)
@device_options
@done_by("neuron.commands.work.run", "run_single_layer")
def single_layer_command() -> None:
    """Run one layer; with --undo, prove a mistake in it: undo the mistake, and judge the layer again.

    A proof exits with 0 if the layer is right without the mistake, with 1 if not, with 3 if it cannot be undone.
    """


@click.command(
    "multi-layer",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test multi-layer --model DIR --start-layer 0 --end-layer 5",
)
@span_device_options
@done_by("neuron.commands.work.run", "run_multi_layer")
def multi_layer_command() -> None:
    """Run a range of layers, each on the output of the layer before."""


@click.command(
    "sweep",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test sweep --model DIR --golden GOLDEN --target port.py:DecoderLayer",
)
@span_device_options
@done_by("neuron.commands.work.run", "run_sweep")
def sweep_command() -> None:
    """Run each layer of a range by itself on the golden's input: the usual way to find a fault."""


@click.command(
    "full",
    cls=Mm2Command,
    resumes=True,
    epilog='\b\nExample: mm2-test full --model DIR --prompt "The capital of France is" --max-new-tokens 8',
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Tokens to generate after each row, greedily. Each one after the first runs all layers again.",
)
@device_options
@done_by("neuron.commands.work.run", "run_full")
def full_command() -> None:
    """Run the whole model from the tokens to the logits, and print what each row generates."""


@click.command(
    "component",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test component --layer 7 --component moe --model DIR --golden GOLDEN",
)
@layer_option
@click.option(
    "--component",
    type=click.Choice([str(component) for component in Component]),
    required=True,
    help="Part of the layer to run.",
)
@device_options
@done_by("neuron.commands.work.run", "run_component")
def component_command() -> None:
    """Run one component of a layer on the golden's values at its border."""
