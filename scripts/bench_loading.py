"""Loading and streaming against a plain read, `from_pretrained` and accelerate's disk offload.

Writes a synthetic MiniMax-M2 of 5.05 GB in BF16 (16 layers of 307 MB, 64 experts, 6 shards), and the same in FP8.
Each measurement is a process of its own. Memory is anonymous memory above the imports, and seconds begin after them.
Ratios are taken between runs that follow each other; figures are medians of several rounds. Packed experts (they stay
FP8 in memory until they are used) are measured on two layers of MiniMax-M2's own size too.

Takes 11 GB of disk and about fifteen minutes. Exit code: 1 if a goal is missed, 3 if a measurement could not run.

--full-size DIR also measures the golden of a checkpoint of the true size (scripts/full_size_checkpoint.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from figures import Figure, benchmark_parser, names_among, print_figures
from loading.bench import LoadingBench
from loading.memory import measure_packed, measure_packed_large, measure_peaks
from loading.models import measure_full_size, measure_split
from loading.scales import SCALES
from loading.speed import measure_dequantising, measure_offload, measure_stream, measure_warm_load

from minimax_tools.synthetic.checkpoint import FP8

# Dtypes of the checkpoints, by the name that `FigureGroup.stored` has.
_DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}


@dataclass(frozen=True, slots=True)
class FigureGroup:
    """Figures that come from the same runs."""

    stored: str | None  # the checkpoint that the runs need, None if they need none
    measure: Callable[..., Iterator[Figure]]  # yields the figures; takes the bench, and the checkpoint if any
    figures: tuple[str, ...]  # names of all figures that `measure` yields


# Words in names of figures. `a_over_b` is a divided by b.
# anonymous, resident: memory without and with the mapped files
# load_pass: all layers loaded one after the other, and nothing computed
# golden_whole: a golden with the whole model in memory; other goldens are streamed, layer by layer
# raw: a plain read of the same bytes; cold, warm: not in the page cache before, or in it
# bound: the longer of the plain cold read and the golden without its reads
# rchar: the kernel's count of bytes read, those of the page cache included
# packed: experts that stay FP8 in memory until they are used


def _stream_names(suffix: str) -> tuple[str, ...]:
    """Return the names for FP8 (no suffix), or for BF16."""
    names = (
        "stream_over_bound", "stream_cold_s", "stream_without_reads_s", "raw_cold_read_s",
        "bytes_read_over_stored", "extra_disk_bytes", "rchar_over_stored",
    )  # fmt: skip
    return tuple(name + suffix for name in names)


def _split_names(model_type: str) -> Iterator[str]:
    names = (
        "peak_anonymous_over_model",
        "peak_resident_over_model",
        "load_s",
        "tokens_per_s",
        "logits_equal",
    )
    yield from (f"split_{model_type}_{name}" for name in names)


_DEQUANTISING = (
    "fp8_dequantise_gb_per_s",
    "fp8_dequantise_share_of_memory_bandwidth",
    "memory_bandwidth_gb_per_s",
)
_PEAKS = (
    "peak_anonymous_over_layer", "peak_anonymous_over_layer_load_pass",
    "peak_anonymous_over_layer_prefetching", "peak_anonymous_over_layer_golden_whole",
    "peak_anonymous_over_layer_from_pretrained", "peak_resident_over_layer",
    "peak_resident_over_layer_from_pretrained", "from_pretrained_load_s", "streamed_capture_equals_whole",
)  # fmt: skip
_WARM_LOAD = (
    "warm_load_over_raw_read", "warm_load_gb_per_s", "raw_warm_read_gb_per_s",
    "raw_warm_read_into_cache_gb_per_s",
)  # fmt: skip
_OFFLOAD = (
    "offload_over_stream", "offload_over_stream_warm", "streamed_logits_s", "offload_load_s",
    "offload_forward_s", "offload_logits_equal_streamed", "extra_disk_gb_of_offload",
    "peak_anonymous_over_layer_offload", "peak_resident_over_layer_offload",
)  # fmt: skip
_PACKED = (
    "peak_anonymous_packed_over_small_fp8_layer",
    "peak_anonymous_over_layer_from_fp8",
    "packed_capture_equals_eager_whole",
)
GROUPS: tuple[FigureGroup, ...] = (
    FigureGroup(None, measure_dequantising, _DEQUANTISING),
    FigureGroup("bf16", measure_peaks, _PEAKS),
    FigureGroup("bf16", measure_warm_load, _WARM_LOAD),
    FigureGroup("bf16", partial(measure_stream, suffix="_bf16"), _stream_names("_bf16")),
    FigureGroup("bf16", measure_offload, _OFFLOAD),
    FigureGroup("fp8", measure_packed, _PACKED),
    FigureGroup("fp8", measure_stream, _stream_names("")),
    FigureGroup(None, measure_packed_large, ("peak_anonymous_packed_over_fp8_layer",)),
    FigureGroup(None, measure_split, (*_split_names("qwen2"), *_split_names("minimax_m2"))),
)
FULL_SIZE_FIGURES = (
    "full_size_num_layers", "full_size_s", "full_size_gb_per_s", "full_size_raw_cold_read_s",
    "full_size_without_reads_s", "full_size_stream_over_bound", "full_size_peak_anonymous_over_layer",
    "full_size_bytes_read_over_stored", "full_size_disk_read_over_stored", "full_size_capture_gb",
)  # fmt: skip
_KNOWN = {name for group in GROUPS for name in group.figures} | set(FULL_SIZE_FIGURES)


def main() -> int:
    """Measure and print; return 1 if a goal is missed, else 0. `loading.bench.stop` ends the script with 3."""
    arguments = _parse_arguments()
    scale = SCALES[arguments.scale]
    if arguments.rounds is not None:
        scale = replace(scale, rounds=arguments.rounds)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        # Goldens have two prompts, of 40 and 24 tokens.
        bench = LoadingBench(scratch=Path(scratch), scale=scale, seq_lens=(40, 24))
        figures = list(_measure(bench, arguments))
    return print_figures("loading", figures, as_json=arguments.json)


def _measure(bench: LoadingBench, arguments: argparse.Namespace) -> Iterator[Figure]:
    only: set[str] = _KNOWN if arguments.only is None else arguments.only
    wanted = [group for group in GROUPS if only & set(group.figures)]
    for group in wanted:
        if group.stored is None:
            yield from group.measure(bench)
    for stored, dtype in _DTYPES.items():
        groups = [group for group in wanted if group.stored == stored]
        if groups:
            with bench.checkpoint(stored, dtype=dtype) as checkpoint:
                for group in groups:
                    yield from group.measure(bench, checkpoint)
    if arguments.full_size is not None and only & set(FULL_SIZE_FIGURES):
        yield from measure_full_size(bench, arguments.full_size, num_layers=arguments.full_size_layers)


def _parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--scratch", type=Path, help="folder with 11 GB free (default: the system's)")
    parser.add_argument(
        "--only",
        type=names_among(_KNOWN),
        metavar="NAME,...",
        help="figures to measure, with those of the same runs (default: all)",
    )
    parser.add_argument("--rounds", type=int, help="number of rounds (default: 3)")
    parser.add_argument(
        "--full-size", type=Path, metavar="DIR", help="checkpoint of the true size (default: none)"
    )
    parser.add_argument(
        "--full-size-layers", type=int, metavar="N", help="number of its first layers (default: all)"
    )
    parser.add_argument(
        "--scale",
        choices=list(SCALES),
        default="full",
        help="size of the measurement; toy tries the script out in a minute (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.full_size is None and arguments.only and arguments.only & set(FULL_SIZE_FIGURES):
        parser.error("--only names a figure of the true size: add --full-size DIR")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
