"""Figures of a sweep, an isolated run of all layers: its compiled graphs, and its time over that of a bare loop.

- `sweep_over_bare`: the time of a sweep over that of a bare loop, both of 62 toy layers on XLA's CPU device (hidden
  256, 32 experts, two rows). The sweep reads the golden and writes all sites. The loop compiles one resident layer,
  runs it 62 times on weights that are loaded already, and copies each output to the host.
- `sweep_over_bare_loading`: the same, over a loop that loads the weights of each layer
- `sweep_cpu_over_bare`: their processor time, of all threads
- `sweep_over_uncompared`, `sweep_cpu_over_uncompared`: both times over those of a sweep that does not compare the
  weights that the port holds with the checkpoint's
- `graphs_for_62_layers`, `compiles_after_first_layer`: compiled graphs of the sweep, in all and after layer 0
- `compile_share_of_bare`: the part of the bare loop's time that is compiling

Each run is a process of its own, timed without imports and the start of torch_xla. The rounds alternate, and the
figures are the medians of their ratios.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu_golden import capture_cpu_golden, write_model
from figures import Figure

from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest

_NUM_LAYERS = {"full": 62, "toy": 4}
_ROUNDS = {"full": 5, "toy": 1}
_SCRIPTS = Path(__file__).parents[1]
_SEQ_LENS = (48, 33)


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
