"""Goldens of true-size layers on a GPU: streamed from the page cache, and whole on the card.

Writes a synthetic MiniMax-M2 of a few layers of true size, in FP8 (3.6 GB a layer). Each measurement is a process of
its own, and seconds begin after its imports. The bound of a stream is the longer of two times: the stored bytes of the
layers over the rate of a copy from pinned memory to the GPU, and a plain warm read of the same bytes.

Needs a GPU with room for the layers in BF16 (7.3 GB each), and memory for the page cache to hold the checkpoint.
Exit code: 1 if a goal is missed, 3 if a measurement could not run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from figures import Figure, benchmark_parser, print_figures
from loading.bench import READ_PLAINLY, SCALES, Checkpoint, LoadingBench, say, stop
from page_cache import CacheState

from minimax_tools.synthetic.checkpoint import FP8
from minimax_tools.synthetic.toy_model import PRESETS

_GPU = "cuda:0"
# One copy to the GPU, and how often it is timed.
_COPIED_BYTES, _COPIES = 2 << 30, 5
# More threads than this gain nothing when a file is read from the page cache.
_READING_THREADS = 8


def main() -> int:
    """Measure and print; return 1 if a goal is missed, else 0. `loading.bench.stop` ends the script with 3."""
    parser = benchmark_parser(__doc__, scale=True, scratch="room for the checkpoint")
    parser.add_argument("--layers", type=int, default=4, help="number of layers (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: %(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        stop("this machine has no CUDA device that torch sees")
    toy = arguments.scale == "toy"
    model = replace(PRESETS["toy" if toy else "m2"], num_hidden_layers=arguments.layers)
    scale = replace(SCALES[arguments.scale], rounds=arguments.rounds)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        bench = LoadingBench(scratch=Path(scratch), scale=scale, seq_lens=(40, 24))
        with bench.checkpoint("fp8", dtype=FP8, model=model) as checkpoint:
            figures = list(_measure(bench, checkpoint))
    say(torch.cuda.get_device_name(0))
    return print_figures("gpu", figures, as_json=arguments.json)


def _measure(bench: LoadingBench, checkpoint: Checkpoint) -> Iterator[Figure]:
    rate = _copy_rate()
    yield Figure.plain("host_to_gpu_gb_per_s", rate / 1e9)
    read_s = _warm_read_s(bench, checkpoint)
    yield Figure.plain("warm_read_gb_per_s", checkpoint.stored_bytes / read_s / 1e9)
    bound_s = max(checkpoint.stored_bytes / rate, read_s)
    yield Figure.plain("bound_s", bound_s)
    on_gpu = ("--device-map", _GPU)
    for floor in ("off", "stats", "full"):
        options = ("--noise-floor", floor, *on_gpu)
        stream_s = _golden_s(bench, checkpoint, "--stream", "on", *options)
        whole_s = _golden_s(bench, checkpoint, "--stream", "off", *options)
        yield Figure.plain(f"stream_{floor}_s", stream_s)
        yield Figure.plain(f"whole_{floor}_s", whole_s)
        yield Figure.at_most(f"stream_over_bound_{floor}", stream_s / bound_s, 1.3)
        yield Figure.plain(f"whole_over_bound_{floor}", whole_s / bound_s)


def _golden_s(bench: LoadingBench, checkpoint: Checkpoint, *options: str) -> float:
    golden = bench.scratch / "captures" / "golden"
    runs = [
        bench.golden(checkpoint, golden, *options, cache=CacheState.WARM) for _ in range(bench.scale.rounds)
    ]
    return median(run.seconds for run in runs)


def _warm_read_s(bench: LoadingBench, checkpoint: Checkpoint) -> float:
    run = bench.probe(
        READ_PLAINLY,
        cache=CacheState.WARM,
        checkpoint=checkpoint,
        model=str(checkpoint.folder),
        num_threads=min(_READING_THREADS, torch.get_num_threads()),
        memory_bytes=0,
        layers_only=False,
    ).values
    return float(run["pass_s"])


def _copy_rate() -> float:
    """Return the bytes per second of the fastest copy from pinned memory to the GPU."""
    source = torch.randint(256, (_COPIED_BYTES,), dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=_GPU)
    seconds = []
    for _ in range(_COPIES):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        torch.cuda.synchronize()
        seconds.append(began.elapsed_time(ended) / 1e3)
    fastest: float = min(seconds)
    return _COPIED_BYTES / fastest


if __name__ == "__main__":
    sys.exit(main())
