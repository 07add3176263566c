"""Many sweeps in one process: its memory and its open files must not grow."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import click.testing
import psutil
import torch
from cpu_golden import capture_cpu_golden, write_model
from port_runs import EXAMPLES

from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest
from neuron.cli import main as mm2_test
from torture.tally import Tally

_NUM_SWEEPS = 1000
# Caches fill in the first sweeps: what comes after must be flat.
_NUM_WARMING = 100
_MOST_GROWN_BYTES = 20e6
# A right port, and one that is wrong in each layer; with their exit codes.
_PORTS = (("port.py:DecoderLayer", 0), ("swapped_device_layer.py:SwappedDeviceLayer", 1))


def run_soak(scratch: Path, _: int) -> Tally:
    """Sweep a small port a thousand times, judged each time; a port that is wrong every second time."""
    tally = Tally(promise=f"memory and descriptors are flat over {_NUM_SWEEPS} sweeps in one process")
    model, golden = scratch / "model", scratch / "golden"
    write_model(model, SyntheticModel(num_hidden_layers=1), dtype=torch.bfloat16)
    capture_cpu_golden(model, golden, rows=InputRequest(seq_lens=(12, 7)), noise_floor="full")
    runner, process = click.testing.CliRunner(), psutil.Process()
    warm_bytes = warm_files = 0
    for number in range(_NUM_SWEEPS):
        port, expected = _PORTS[number % 2]
        sides = ("--model", model, "--golden", golden, "--output-dir", scratch / "run", "--overwrite")
        words = ("sweep", *sides, "--target", EXAMPLES / port, "--backend", "cpu", "--quiet")
        result = runner.invoke(mm2_test, [str(word) for word in words])
        tally.check(result.exit_code == expected, f"sweep {number} of {port}: exit code {result.exit_code}")
        if number == _NUM_WARMING:
            warm_bytes, warm_files = _resident_bytes(process), _count_files()
    grown_bytes, grown_files = _resident_bytes(process) - warm_bytes, _count_files() - warm_files
    tally.check(grown_bytes <= _MOST_GROWN_BYTES, f"resident memory grew by {grown_bytes / 1e6:.1f} MB")
    tally.check(grown_files <= 0, f"{grown_files} more open files")
    tally.figures |= {"grown_mb": grown_bytes / 1e6, "grown_descriptors": grown_files}
    return tally


def _resident_bytes(process: psutil.Process) -> int:
    gc.collect()
    resident: int = process.memory_info().rss
    return resident


def _count_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the descriptor that lists is closed by then
