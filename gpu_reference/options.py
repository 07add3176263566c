"""The options of `mm2-gpu` alone; those it shares with other commands are in `minimax_tools.command_line.options`."""

from __future__ import annotations

from pathlib import Path

import click

from gpu_reference.model.model import ATTN_IMPLEMENTATIONS, EXPERTS_IMPLEMENTATIONS
from gpu_reference.streaming.stream_choice import STREAM_MODES
from minimax_tools.command_line.options import (
    input_options,
    memory_budget_option,
    model_option,
    optional_model_option,
    output_options,
    run_options,
    stack_options,
    store_options,
)
from minimax_tools.reference.variants import DEFAULT_NUM_VARIANTS, MOST_VARIANTS

_placement_options = (
    click.option(
        "--device-map",
        default="auto",
        show_default=True,
        metavar="auto|balanced|balanced_low_0|sequential|cuda:N|cpu|JSON",
        help="Where to put the model; JSON, or a .json file, maps modules to devices.",
    ),
    click.option(
        "--max-memory",
        metavar="40GB|0:40GB,1:60GB,cpu:100GB",
        help="Memory for weights: of each GPU, or device by device.",
    ),
    click.option(
        "--offload-folder",
        type=click.Path(path_type=Path, file_okay=False),
        help="Where weights go that fit in no memory.",
    ),
)
_streaming_options = (
    click.option(
        "--stream",
        type=click.Choice(STREAM_MODES),
        default="auto",
        show_default=True,
        help="Run with one layer's weights in memory; auto: where the model does not fit.",
    ),
    click.option(
        "--prefetch/--no-prefetch",
        default=None,
        help="Read the next layer while one runs; by default where memory holds two.",
    ),
    click.option(
        "--packed-experts",
        is_flag=True,
        help="Keep experts FP8 in memory, dequantise each when it is used: half a layer's memory.",
    ),
    memory_budget_option,
)
_computation_options = (
    click.option(
        "--attn-implementation",
        type=click.Choice(ATTN_IMPLEMENTATIONS),
        default="sdpa",
        show_default=True,
        help="How transformers computes attention.",
    ),
    click.option(
        "--experts-implementation",
        type=click.Choice(EXPERTS_IMPLEMENTATIONS),
        default="grouped_mm",
        show_default=True,
        help="How transformers computes the experts.",
    ),
    click.option(
        "--noise-floor",
        type=click.Choice(["full", "stats", "off"]),
        default="full",
        show_default=True,
        help="Keep each layer's float32 twin, its distances only, or nothing; a float32 run has none.",
    ),
    click.option(
        "--floor-variants",
        type=click.IntRange(0, MOST_VARIANTS),
        metavar="N",
        help="Also compute each layer in N other right ways, to measure how far right ports stray. "
        f"0 saves time and judges more coarsely.  [default: {DEFAULT_NUM_VARIANTS}]",
    ),
    click.option("--no-save", is_flag=True, help="Print statistics, write nothing."),
    click.option(
        "--certify",
        is_flag=True,
        help="Check what was stored, as mm2-gpu certify does: each layer is read and computed in float32 once more.",
    ),
)
_plan_options = stack_options(
    click.option(
        "--plan",
        "plan_file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Divide the run as this plan of mm2-split says, a slice for each rank of torchrun; "
        "set OMP_NUM_THREADS to cores per rank, or torchrun makes it 1.",
    ),
    click.option(
        "--slices",
        "slices_folder",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="With --plan: read each slice from its own folder in this one, as mm2-split extract writes them.",
    ),
)
sampling_options = stack_options(
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        help="Tokens to generate for each row, at most.",
    ),
    click.option("--do-sample", is_flag=True, help="Draw instead of taking the most likely token."),
    click.option("--temperature", type=click.FloatRange(min=0, min_open=True), help="Divisor of the logits."),
    click.option("--top-k", type=click.IntRange(min=1), help="Draw among so many tokens."),
    click.option(
        "--top-p",
        type=click.FloatRange(min=0, max=1, min_open=True),
        help="Draw among the tokens that hold this share of the probability.",
    ),
)


_run_golden_options = stack_options(
    input_options,
    run_options,
    store_options,
    *_placement_options,
    *_streaming_options,
    *_computation_options,
    output_options,
)
golden_options = stack_options(model_option, _run_golden_options)
planned_golden_options = stack_options(optional_model_option, _plan_options, _run_golden_options)
