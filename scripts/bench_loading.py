"""Loading and streaming against a plain read, `from_pretrained` and accelerate's disk offload.

Writes a synthetic MiniMax-M2 of 5.05 GB in BF16 (16 layers of 307 MB, 64 experts, 6 shards), and the same in FP8.
Each measurement is a process of its own. Memory is anonymous memory above the imports, and seconds begin after them.
Ratios are taken between runs that follow each other; figures are medians of several rounds. Packed experts (they stay
FP8 in memory until they are used) are measured on two layers of MiniMax-M2's own size too.

Takes 11 GB of disk and about fifteen minutes. Exit code: 1 if a goal is missed, 3 if a measurement could not run.

--full-size DIR also measures the golden of a checkpoint of the true size (scripts/full_size_checkpoint.py). --only gpu
measures three layers of the true size on a GPU, with memory for the page cache to hold them (14 GB).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from figures import Figure, benchmark_parser, print_figures
from loading.bench import SCALES, LoadingBench
from loading.memory import measure_packed, measure_packed_large, measure_peaks
from loading.speed import (
    measure_dequantising,
    measure_full_size,
    measure_offload,
    measure_on_gpu,
    measure_stream,
    measure_warm_load,
)

from minimax_tools.synthetic.checkpoint import FP8

# Groups of figures, by the dtype of the checkpoint that they need; None if they need none. Words in names of figures:
# anonymous, resident: memory without and with the mapped files
# golden_whole: a golden with the whole model in memory; other goldens are streamed, layer by layer
# raw: a plain read of the same bytes; cold, warm: not in the page cache before, or in it
# bound: the longer of the plain cold read and the golden without its reads
# rchar: the kernel's count of bytes read, those of the page cache included
# packed: experts that stay FP8 in memory until they are used
GROUPS: Mapping[str, tuple[torch.dtype | None, Callable[..., Iterator[Figure]]]] = {
    "dequantising": (None, measure_dequantising),
    "packed_large": (None, measure_packed_large),
    "peaks": (torch.bfloat16, measure_peaks),
    "warm_load": (torch.bfloat16, measure_warm_load),
    "stream_bf16": (torch.bfloat16, partial(measure_stream, suffix="_bf16")),
    "offload": (torch.bfloat16, measure_offload),
    "packed": (FP8, measure_packed),
    "stream_fp8": (FP8, measure_stream),
    "gpu": (None, measure_on_gpu),
}
# A GPU is asked for by its name.
_DEFAULT = tuple(name for name in GROUPS if name != "gpu")


def main() -> int:
    """Measure and print; return 1 if a goal is missed, else 0. `loading.bench.stop` ends the script with 3."""
    parser = benchmark_parser(__doc__, scale=True, scratch="11 GB free")
    parser.add_argument(
        "--only", nargs="*", choices=GROUPS, default=_DEFAULT, help="groups (default: all but gpu)"
    )
    parser.add_argument(
        "--full-size", type=Path, metavar="DIR", help="checkpoint of the true size (default: none)"
    )
    parser.add_argument(
        "--full-size-layers", type=int, metavar="N", help="number of its first layers (default: all)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        # Goldens have two prompts, of 40 and 24 tokens.
        bench = LoadingBench(scratch=Path(scratch), scale=SCALES[arguments.scale], seq_lens=(40, 24))
        figures = list(_measure(bench, arguments))
    return print_figures("loading", figures, as_json=arguments.json)


def _measure(bench: LoadingBench, arguments: argparse.Namespace) -> Iterator[Figure]:
    wanted = [GROUPS[name] for name in arguments.only]
    for stored, measure in wanted:
        if stored is None:
            yield from measure(bench)
    for dtype in (torch.bfloat16, FP8):
        measures = [measure for stored, measure in wanted if stored == dtype]
        if measures:
            with bench.checkpoint(str(dtype), dtype=dtype) as checkpoint:
                for measure in measures:
                    yield from measure(bench, checkpoint)
    if arguments.full_size is not None:
        yield from measure_full_size(bench, arguments.full_size, num_layers=arguments.full_size_layers)


if __name__ == "__main__":
    sys.exit(main())
