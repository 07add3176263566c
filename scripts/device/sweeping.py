"""Figures of a sweep, an isolated run of all layers: its compiled graphs, and its time over that of a bare loop.

Each run is a process of its own, timed without imports and the start of torch_xla. Of toy layers, the rounds alternate,
and the figures are the medians of their ratios:

- `sweep_over_bare`: the time of a sweep over that of a bare loop, both of 62 toy layers on XLA's CPU device (hidden
  256, 32 experts, two rows). The sweep reads the golden and writes all sites. The loop compiles one resident layer,
  runs it 62 times on weights that are loaded already, and copies each output to the host.
- `sweep_over_bare_loading`: the same, over a loop that loads the weights of each layer
- `sweep_cpu_over_bare`: their processor time, of all threads
- `sweep_over_uncompared`, `sweep_cpu_over_uncompared`: both times over those of a sweep that does not compare the
  weights that the port holds with the checkpoint's
- `graphs_for_62_layers`, `compiles_after_first_layer`: compiled graphs of the sweep, in all and after layer 0
- `compile_share_of_bare`: the part of the bare loop's time that is compiling

Of layers of the true size, whose weights take longer to read than most devices to run:

- `true_size_sweep_over_bound`: the time of a sweep over the longer of two times: a plain read of the layers' bytes by
  all threads, and running the layers on weights that are there. The sweep and the read find the page cache cold; both
  the sweep and the bare run compile.
- `true_size_sweep_over_uncompared`, `true_size_sweep_cpu_over_uncompared`: both times of a sweep over those of one that
  does not compare the weights that the port holds, with the shards in the page cache
- `true_size_sweep_s`, `true_size_read_s`, `true_size_bare_s`: these three times
- `true_size_sweep_cpu_s`, `true_size_bare_cpu_s`: processor time of all threads, which also dequantise in a sweep

Two FP8 layers of MiniMax-M2's dimensions with a small vocabulary: 7.4 GB of disk. The golden's inputs are drawn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu_golden import capture_cpu_golden, draw_golden, write_model
from figures import Figure
from loading.reads import read_plainly
from page_cache import drop_cache

from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest

_NUM_LAYERS = {"full": 62, "toy": 4}
_ROUNDS = {"full": 5, "toy": 1}
_SCRIPTS = Path(__file__).parents[1]
_SEQ_LENS = (48, 33)
_TRUE_SIZE = {
    "full": replace(SyntheticModel.m2(), num_hidden_layers=2, vocab_size=512),
    "toy": SyntheticModel(num_hidden_layers=2),
}


def measure(scale: str) -> Iterator[Figure]:
    """Yield the figures of a sweep."""
    with tempfile.TemporaryDirectory() as folder:
        model, golden = Path(folder, "model"), Path(folder, "golden")
        write_model(model, SyntheticModel(num_hidden_layers=_NUM_LAYERS[scale]), dtype=torch.bfloat16)
        capture_cpu_golden(model, golden, rows=InputRequest(seq_lens=_SEQ_LENS), noise_floor="off")
        ways = ("sweep", "uncompared", "bare", "bare-loading")
        rounds = [
            {way: run_way(way, model, golden, Path(folder, f"{way}-{number}")) for way in ways}
            for number in range(_ROUNDS[scale])
        ]
    sweep = rounds[0]["sweep"]
    yield Figure.at_most("graphs_for_62_layers", sweep["first_layer"] + sweep["later_layers"], 3)
    yield Figure.exactly("compiles_after_first_layer", sweep["later_layers"], 0)
    yield Figure.at_most("sweep_over_bare", _ratio(rounds, "bare"), 1.3)
    yield Figure.plain("sweep_cpu_over_bare", _ratio(rounds, "bare", "cpu_s"))
    yield Figure.at_most("sweep_over_uncompared", _ratio(rounds, "uncompared"), 1.15)
    yield Figure.plain("sweep_cpu_over_uncompared", _ratio(rounds, "uncompared", "cpu_s"))
    yield Figure.plain("sweep_over_bare_loading", _ratio(rounds, "bare-loading"))
    yield Figure.plain(
        "compile_share_of_bare",
        median(records["bare"]["compile_s"] / records["bare"]["seconds"] for records in rounds),
    )


def _ratio(rounds: list[dict[str, dict[str, Any]]], way: str, time: str = "seconds") -> float:
    """Return the time of a sweep over that of another way: the median of the rounds."""
    ratios: list[float] = [records["sweep"][time] / records[way][time] for records in rounds]
    return median(ratios)


def run_way(way: str, model: Path, golden: Path, output: Path) -> dict[str, Any]:
    """Run a process of `timed_sweep`, and return its JSON object: three times, and a sweep's numbers of graphs."""
    command = [sys.executable, "-m", "device.timed_sweep", way, str(model), str(golden), str(output)]
    done = subprocess.run(command, cwd=_SCRIPTS, stdout=subprocess.PIPE, text=True, check=True)
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def measure_true_size(scale: str) -> Iterator[Figure]:
    """Yield the figures of layers of the true size, of one round."""
    with tempfile.TemporaryDirectory() as folder:
        model, golden = Path(folder, "model"), Path(folder, "golden")
        write_model(model, _TRUE_SIZE[scale])
        draw_golden(model, golden, rows=InputRequest(seq_lens=(40, 24)))
        shards = tuple(model.glob("*.safetensors"))
        drop_cache(shards)
        sweep = run_way("sweep", model, golden, Path(folder, "sweep"))
        drop_cache(shards)
        threads = torch.get_num_threads()
        read_s = read_plainly(str(model), num_threads=threads, memory_bytes=0, layers_only=True)["pass_s"]
        bare = run_way("bare", model, golden, Path(folder, "bare"))
        warm, uncompared = (
            run_way(way, model, golden, Path(folder, f"{way}-warm")) for way in ("sweep", "uncompared")
        )
    yield Figure.at_most("true_size_sweep_over_bound", sweep["seconds"] / max(read_s, bare["seconds"]), 1.2)
    for name, time in (("", "seconds"), ("_cpu", "cpu_s")):
        ratio = warm[time] / uncompared[time]
        yield Figure.at_most(f"true_size_sweep{name}_over_uncompared", ratio, 1.15)
    yield Figure.plain("true_size_read_s", read_s)
    for way, record in (("sweep", sweep), ("bare", bare)):
        yield Figure.plain(f"true_size_{way}_s", record["seconds"])
        yield Figure.plain(f"true_size_{way}_cpu_s", record["cpu_s"])
