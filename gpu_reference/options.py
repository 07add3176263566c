"""Options of `mm2-gpu` alone; shared ones are in `minimax_tools.command_line.options`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpu_reference.golden.sampling import Sampling
from gpu_reference.streaming.streaming_request import STREAM_MODES, StreamingRequest
from minimax_tools.command_line.options import (
    CaptureStore,
    grouped_as,
    input_options,
    memory_budget_option,
    model_option,
    optional_model_option,
    output_options,
    run_options,
    stack_options,
    store_options,
)
from minimax_tools.reference.variant_names import DEFAULT_NUM_VARIANTS, MOST_VARIANTS
from minimax_tools.text.input_request import InputRequest

if TYPE_CHECKING:
    import torch


EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
ATTN_IMPLEMENTATIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenOptions:
    """The options of a golden, each under its option's name, where its help explains it.

    None means that an option was not given. `memory_budget` is in bytes. `device_map` and `max_memory` are still text,
    because `parse_placement` needs the devices of this machine.
    """

    model: str | None
    inputs: InputRequest
    sites_level: str
    dtype: torch.dtype
    store: CaptureStore
    device_map: str
    max_memory: str | None
    offload_folder: Path | None
    streaming: StreamingRequest
    memory_budget: int | None
    attn_implementation: str
    experts_implementation: str
    noise_floor: str
    floor_variants: int | None
    no_save: bool
    certify: bool
    as_json: bool


_golden_options = stack_options(
    input_options,
    run_options,
    store_options,
    click.option(
        "--device-map",
        default="auto",
        show_default=True,
        metavar="auto|balanced|balanced_low_0|sequential|cuda:N|cpu|JSON",
        help="Placement of the model. JSON, or a .json file, maps modules to devices.",
    ),
    click.option(
        "--max-memory",
        metavar="40GB|0:40GB,1:60GB,cpu:100GB",
        help="Memory for weights: of each GPU, or device by device. Default: what is free.",
    ),
    click.option(
        "--offload-folder",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder for weights that fit in no memory. Default: none.",
    ),
    click.option(
        "--stream",
        type=click.Choice(STREAM_MODES),
        default="auto",
        show_default=True,
        help="Keep one layer's weights in memory at a time; auto: only if the model does not fit.",
    ),
    click.option(
        "--prefetch/--no-prefetch",
        default=None,
        help="Read the next layer while one runs. Default: on if memory holds two.",
    ),
    click.option(
        "--packed-experts",
        is_flag=True,
        help="Keep experts in FP8 and dequantise each when it is used. Halves a layer's memory.",
    ),
    # The command gets the options that are fields of `StreamingRequest` as one argument, `streaming`.
    grouped_as("streaming", StreamingRequest),
    memory_budget_option,
    click.option(
        "--attn-implementation",
        type=click.Choice(ATTN_IMPLEMENTATIONS),
        default="sdpa",
        show_default=True,
        help="Attention implementation of transformers.",
    ),
    click.option(
        "--experts-implementation",
        type=click.Choice(EXPERTS_IMPLEMENTATIONS),
        default="grouped_mm",
        show_default=True,
        help="Experts implementation of transformers.",
    ),
    click.option(
        "--noise-floor",
        type=click.Choice(["full", "stats", "off"]),
        default="full",
        show_default=True,
        help="Store each layer's float32 twin (full), its distances only (stats), or nothing (off). "
        "With --dtype float32: off.",
    ),
    click.option(
        "--floor-variants",
        type=click.IntRange(0, MOST_VARIANTS),
        metavar="N",
        help="Also compute each layer in N other correct ways, to measure how far correct ports may differ. "
        f"0 is faster, and judges more coarsely. Default: {DEFAULT_NUM_VARIANTS}.",
    ),
    click.option("--no-save", is_flag=True, help="Print statistics, write nothing."),
    click.option(
        "--certify",
        is_flag=True,
        help="Check the capture, as mm2-gpu certify does: reads and computes each layer once more, in float32.",
    ),
    output_options,
    grouped_as("options", GoldenOptions),
)
golden_options = stack_options(model_option, _golden_options)
planned_golden_options = stack_options(
    optional_model_option,
    click.option(
        "--plan",
        "plan_file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Plan of mm2-split: each rank of torchrun runs one slice. "
        "Set OMP_NUM_THREADS to the cores per rank; torchrun sets it to 1 otherwise.",
    ),
    click.option(
        "--slices",
        "slices_folder",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="With --plan: parent folder of the slices that mm2-split extract wrote. Default: read the checkpoint.",
    ),
    _golden_options,
)
sampled_golden_options = stack_options(
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        help="Most tokens to generate for each row.",
    ),
    click.option("--do-sample", is_flag=True, help="Draw tokens. Default: take the most likely one."),
    click.option(
        "--temperature",
        type=click.FloatRange(min=0, min_open=True),
        help="Divisor of the logits, with --do-sample. Default: 1.",
    ),
    click.option(
        "--top-k", type=click.IntRange(min=1), help="Draw among the K most likely tokens. Default: all."
    ),
    click.option(
        "--top-p",
        type=click.FloatRange(min=0, max=1, min_open=True),
        help="Draw among the most likely tokens that hold this share of the probability. Default: all.",
    ),
    golden_options,
    # The command gets the options above that `Sampling` has fields for as one argument. It comes last: the options of
    # the inputs take --seed first, and the command puts it into the sampling.
    grouped_as("sampling", Sampling),
)
