"""The commands of `mm2-test` that run layers: single-layer, multi-layer, sweep, full and component."""

from __future__ import annotations

from collections.abc import Callable

import click

from minimax_tools.command_line.console import Mm2Command, loading
from minimax_tools.command_line.options import layer_option
from minimax_tools.model.run import (
    Component,
    Run,
    component_run,
    full_run,
    multi_layer_run,
    single_layer_run,
    sweep_run,
)
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from neuron.options import DeviceOptions, device_options, span_device_options


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
def single_layer_command(layer: int, mistakes: tuple[str, ...], options: DeviceOptions) -> None:
    """Run one layer; with --undo, prove a mistake in it: undo the mistake, and judge the layer again.

    A proof exits with 0 if the layer is right without the mistake, with 1 if not, with 3 if it cannot be undone.
    """
    if mistakes:
        with loading():
            from neuron.commands.undo import prove_layer

        prove_layer(options, layer, mistakes)
    _run(options, lambda spec: single_layer_run(layer, sites_level=options.sites_level, graph=spec.graph))


@click.command(
    "multi-layer",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test multi-layer --model DIR --start-layer 0 --end-layer 5",
)
@span_device_options
def multi_layer_command(span: Span | None, options: DeviceOptions) -> None:
    """Run a range of layers, each on the output of the layer before."""
    _run(
        options,
        lambda spec: multi_layer_run(
            span or Span(0, spec.num_hidden_layers), sites_level=options.sites_level, graph=spec.graph
        ),
    )


@click.command(
    "sweep",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test sweep --model DIR --golden GOLDEN --target port.py:DecoderLayer",
)
@span_device_options
def sweep_command(span: Span | None, options: DeviceOptions) -> None:
    """Run each layer of a range by itself on the golden's input: the usual way to find a fault."""
    _run(
        options,
        lambda spec: sweep_run(
            span or Span(0, spec.num_hidden_layers), sites_level=options.sites_level, graph=spec.graph
        ),
    )


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
def full_command(options: DeviceOptions) -> None:
    """Run the whole model from the tokens to the logits, and print what each row generates."""
    # --max-new-tokens is in `options`, like every option that `DeviceOptions` has.
    _run(
        options,
        lambda spec: full_run(spec.num_hidden_layers, sites_level=options.sites_level, graph=spec.graph),
    )


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
def component_command(layer: int, component: str, options: DeviceOptions) -> None:
    """Run one component of a layer on the golden's values at its border."""
    _run(options, lambda spec: component_run(layer, Component(component), graph=spec.graph))


def _run(options: DeviceOptions, make_run: Callable[[ModelSpec], Run]) -> None:
    with loading():
        from neuron.commands.device_run import run_device

    run_device(options, make_run)
