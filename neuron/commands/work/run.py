"""The commands of `mm2-test` that run layers, at work."""

from __future__ import annotations

from minimax_tools.model.run import (
    Component,
    component_run,
    full_run,
    multi_layer_run,
    single_layer_run,
    sweep_run,
)
from minimax_tools.model.span import Span
from neuron.commands.work.device_run import run_device
from neuron.commands.work.undo import prove_layer
from neuron.options import DeviceOptions


def run_single_layer(layer: int, mistakes: tuple[str, ...], options: DeviceOptions) -> None:
    """Run one layer; with mistakes, undo them and judge the layer again."""
    if mistakes:
        prove_layer(options, layer, mistakes)
    run_device(options, lambda _: single_layer_run(layer, sites_level=options.sites_level))


def run_multi_layer(span: Span | None, options: DeviceOptions) -> None:
    """Run a range of chained layers; None stands for all."""
    run_device(
        options,
        lambda spec: multi_layer_run(
            span or Span(0, spec.num_hidden_layers), sites_level=options.sites_level
        ),
    )


def run_sweep(span: Span | None, options: DeviceOptions) -> None:
    """Run each layer of a range by itself; None stands for all."""
    run_device(
        options,
        lambda spec: sweep_run(span or Span(0, spec.num_hidden_layers), sites_level=options.sites_level),
    )


def run_full(options: DeviceOptions) -> None:
    """Run the whole model."""
    # --max-new-tokens is in `options`, like every option that `DeviceOptions` has.
    run_device(options, lambda spec: full_run(spec.num_hidden_layers, sites_level=options.sites_level))


def run_component(layer: int, component: str, options: DeviceOptions) -> None:
    """Run one component of a layer."""
    run_device(options, lambda _: component_run(layer, Component(component)))
