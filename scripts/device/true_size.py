"""Figures of a sweep over layers of the true size, whose weights take longer to read than most devices to run.

- `true_size_sweep_over_bound`: the time of a sweep over the longer of two times: a plain read of the layers' bytes by
  all threads, and running the layers on weights that are there. The sweep and the read find the page cache cold; both
  the sweep and the bare run compile.
- `true_size_sweep_over_uncompared`, `true_size_sweep_cpu_over_uncompared`: both times of a sweep over those of one that
  does not compare the weights that the port holds, with the shards in the page cache
- `true_size_sweep_s`, `true_size_read_s`, `true_size_bare_s`: these three times
- `true_size_sweep_cpu_s`, `true_size_bare_cpu_s`: processor time of all threads, which also dequantise in a sweep

Two FP8 layers of MiniMax-M2's dimensions with a small vocabulary: 7.4 GB of disk. The golden's inputs are drawn.
Each run is a process of its own, timed without imports and the start of torch_xla.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from cpu_golden import draw_golden, write_model
from figures import Figure
from loading.reads import read_plainly
from page_cache import drop_cache

from device.sweeping import run_way
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest

_MODELS = {
    "full": replace(SyntheticModel.m2(), num_hidden_layers=2, vocab_size=512),
    "toy": SyntheticModel(num_hidden_layers=2),
}
_ROUNDS = 1
_SEQ_LENS = (40, 24)


def measure(scale: str) -> Iterator[Figure]:
    """Yield the figures of layers of the true size."""
    sweeps, reads, bares, pairs = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        model, golden = Path(folder, "model"), Path(folder, "golden")
        write_model(model, _MODELS[scale])
        draw_golden(model, golden, rows=InputRequest(seq_lens=_SEQ_LENS))
        shards = tuple(model.glob("*.safetensors"))
        for number in range(_ROUNDS):
            drop_cache(shards)
            sweeps.append(run_way("sweep", model, golden, Path(folder, f"sweep-{number}")))
            drop_cache(shards)
            read = read_plainly(
                str(model), num_threads=torch.get_num_threads(), memory_bytes=0, layers_only=True
            )
            reads.append(read["pass_s"])
            bares.append(run_way("bare", model, golden, Path(folder, f"bare-{number}")))
            ways = ("sweep", "uncompared")
            pairs.append([run_way(way, model, golden, Path(folder, f"{way}-warm-{number}")) for way in ways])
    ratios = [
        sweep["seconds"] / max(read, bare["seconds"])
        for sweep, read, bare in zip(sweeps, reads, bares, strict=True)
    ]
    yield Figure.at_most("true_size_sweep_over_bound", median(ratios), 1.2)
    over = {
        time: median(sweep[time] / uncompared[time] for sweep, uncompared in pairs)
        for time in ("seconds", "cpu_s")
    }
    yield Figure.at_most("true_size_sweep_over_uncompared", over["seconds"], 1.15)
    yield Figure.at_most("true_size_sweep_cpu_over_uncompared", over["cpu_s"], 1.15)
    yield Figure.plain("true_size_read_s", median(reads))
    for way, records in (("sweep", sweeps), ("bare", bares)):
        yield Figure.plain(f"true_size_{way}_s", median(record["seconds"] for record in records))
        yield Figure.plain(f"true_size_{way}_cpu_s", median(record["cpu_s"] for record in records))
