"""Ports run over the inputs of a golden, in this process or on several ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import BackendError
from minimax_tools.model.run import Mode, Run
from minimax_tools.model.spec import ModelSpec
from neuron.devices.runtime import Runtime
from neuron.ports.target import Target
from neuron.runs.device_request import DeviceRequest
from neuron.runs.runner import DeviceRun

EXAMPLES = Path(__file__).parent / "examples"
_REPOSITORY = Path(__file__).parents[1]


def request_run(folder: Path, golden: Capture, target: Target, run: Run) -> DeviceRequest:
    """Describe a BF16 run of a port over the inputs of a golden; `folder` is that of the checkpoint."""
    golden = golden if run.mode is Mode.ISOLATED else golden.natural()
    return DeviceRequest(
        folder=folder,
        spec=ModelSpec.from_folder(folder),
        model_source=str(folder),
        run=run,
        inputs=golden.read_inputs(),
        dtype=torch.bfloat16,
        target=target,
        golden=golden,
    )


def run_port(
    golden: Capture, target: Target, run: Run, *, reader: CheckpointReader, runtime: Runtime, directory: Path
) -> Capture:
    """Run a port in this process, and capture it in `directory`, which is emptied first."""
    shutil.rmtree(directory, ignore_errors=True)
    request = request_run(reader.folder, golden, target, run)
    DeviceRun(request, runtime=runtime, reader=reader).capture(directory)
    return Capture.open(directory)


def run_on_ranks(
    command: str, folder: Path, golden: Capture, *, tp_degree: int, backend: str, directory: Path
) -> Capture:
    """Run mm2's own layer on several ranks, by the command `sweep` or `full` of `mm2-test`.

    The capture lies in `directory`, which is emptied first; `folder` is that of the checkpoint.

    Raises:
        BackendError: The ranks could not run.
    """
    shutil.rmtree(directory, ignore_errors=True)
    options = {
        "--model": folder,
        "--golden": golden.directory,
        "--tp-degree": tp_degree,
        "--backend": backend,
        "--sites": "all",
        "--output-dir": directory,
    }
    words = [str(word) for option in options.items() for word in option]
    done = subprocess.run(
        [sys.executable, "-m", "neuron", command, *words, "--json", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
        cwd=_REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": "1"},
    )
    # With exit code 1 the verdict is fail, and the capture is complete.
    if done.returncode not in (0, 1):
        raise BackendError(f"{tp_degree} ranks on {backend} did not run", found=done.stderr[-2000:])
    return Capture.open(directory)
