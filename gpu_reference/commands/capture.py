"""The commands of `mm2-gpu` that capture: extract-all, full, single-layer and multi-layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from gpu_reference.golden.sampling import Sampling
from gpu_reference.options import (
    GoldenOptions,
    golden_options,
    planned_golden_options,
    sampled_golden_options,
)
from minimax_tools.command_line.console import Mm2Command, loading
from minimax_tools.command_line.options import layer_option, span_options
from minimax_tools.errors import UsageError
from minimax_tools.model.run import multi_layer_run, single_layer_run
from minimax_tools.model.span import Span


@click.command(
    "extract-all",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\n"
    "By a plan of two slices, on 16 cores:\n"
    "  OMP_NUM_THREADS=8 torchrun --nproc-per-node 2 -m gpu_reference extract-all --plan P.json\n"
    "Example: mm2-gpu extract-all --model DIR --max-memory 40GB",
)
@planned_golden_options
def extract_all_command(plan_file: Path | None, slices_folder: Path | None, options: GoldenOptions) -> None:
    """Capture every layer in one forward pass, by one process or, with --plan, by several ranks."""
    with loading():
        from gpu_reference.commands.golden_run import run_golden, run_planned, whole_model_run

    if plan_file is not None:
        run_planned(options, plan_file, slices_folder)
        return
    if slices_folder is not None:
        raise UsageError("--slices belongs to a plan", next_step="Give --plan too.")
    run_golden(options, lambda spec: whole_model_run(options, spec))


@click.command(
    "full",
    cls=Mm2Command,
    resumes=True,
    epilog='\b\nExample: mm2-gpu full --model DIR --prompt "The capital of France is"',
)
@sampled_golden_options
def full_command(sampling: Sampling, options: GoldenOptions) -> None:
    """Capture every layer, then generate; token ids and text are saved beside the activations."""
    with loading():
        from gpu_reference.commands.golden_run import run_golden, whole_model_run

    # --seed is one of the options of the inputs.
    sampling = replace(sampling, seed=options.inputs.seed)
    run_golden(options, lambda spec: whole_model_run(options, spec), sampling)


@click.command(
    "single-layer",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-gpu single-layer --model DIR --layer 7",
)
@layer_option
@golden_options
def single_layer_command(layer: int, options: GoldenOptions) -> None:
    """Capture one layer; the layers before it run too, to compute its input."""
    with loading():
        from gpu_reference.commands.golden_run import run_golden

    run_golden(
        options, lambda spec: single_layer_run(layer, sites_level=options.sites_level, graph=spec.graph)
    )


@click.command(
    "multi-layer",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-gpu multi-layer --model DIR --start-layer 0 --end-layer 5",
)
@span_options
@golden_options
def multi_layer_command(span: Span | None, options: GoldenOptions) -> None:
    """Capture a range of layers; the layers before it run too. Default: all layers."""
    with loading():
        from gpu_reference.commands.golden_run import run_golden

    run_golden(
        options,
        lambda spec: multi_layer_run(
            span or Span(0, spec.num_hidden_layers), sites_level=options.sites_level, graph=spec.graph
        ),
    )
