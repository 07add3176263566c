"""The commands of `mm2-gpu` that capture: extract-all, full, single-layer and multi-layer."""

from __future__ import annotations

import click

from gpu_reference.options import golden_options, planned_golden_options, sampled_golden_options
from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import layer_option, span_options
from minimax_tools.command_line.work import done_by


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
@done_by("gpu_reference.commands.work.capture", "capture_all")
def extract_all_command() -> None:
    """Capture every layer in one forward pass, by one process or, with --plan, by several ranks."""


@click.command(
    "full",
    cls=Mm2Command,
    resumes=True,
    epilog='\b\nExample: mm2-gpu full --model DIR --prompt "The capital of France is"',
)
@sampled_golden_options
@done_by("gpu_reference.commands.work.capture", "capture_and_generate")
def full_command() -> None:
    """Capture every layer, then generate; token ids and text are saved beside the activations."""


@click.command(
    "single-layer",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-gpu single-layer --model DIR --layer 7",
)
@layer_option
@golden_options
@done_by("gpu_reference.commands.work.capture", "capture_layer")
def single_layer_command() -> None:
    """Capture one layer; the layers before it run too, to compute its input."""


@click.command(
    "multi-layer",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-gpu multi-layer --model DIR --start-layer 0 --end-layer 5",
)
@span_options
@golden_options
@done_by("gpu_reference.commands.work.capture", "capture_layers")
def multi_layer_command() -> None:
    """Capture a range of layers; the layers before it run too. Default: all layers."""
