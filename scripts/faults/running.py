"""Running: a port through the device runner over all layers of a scene, isolated or chained."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from faults.scene import Scene
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import BackendError
from minimax_tools.model.run import Run, full_run, sweep_run
from minimax_tools.model.span import Span
from neuron.devices.runtime import Runtime
from neuron.ports.target import Target
from neuron.runs.device_request import DeviceRequest
from neuron.runs.runner import DeviceRun

_ROOT = Path(__file__).parents[2]


def run_port(
    scene: Scene, target: Target, *, runtime: Runtime, directory: Path, decode_rows: int = 0
) -> Capture:
    """Sweep all layers in this process; what lay in `directory` is gone.

    Args:
        scene: Model and golden.
        target: The port.
        runtime: The device.
        directory: Where the capture goes.
        decode_rows: How many rows of each prompt are decoded.
    """
    run = sweep_run(Span(0, scene.spec.num_hidden_layers), sites_level="all").decoding(decode_rows)
    return _run(scene, target, run, runtime=runtime, directory=directory)


def run_whole_model(scene: Scene, target: Target, *, runtime: Runtime, directory: Path) -> Capture:
    """Run all layers chained, from the embedding to the logits; what lay in `directory` is gone."""
    run = full_run(scene.spec.num_hidden_layers, sites_level="all")
    return _run(scene, target, run, runtime=runtime, directory=directory)


def run_ranks(scene: Scene, *, tp_degree: int, backend: str, directory: Path) -> Capture:
    """Sweep all layers of mm2's own layer on several ranks, which need processes of their own.

    Raises:
        BackendError: The ranks could not run.
    """
    shutil.rmtree(directory, ignore_errors=True)
    options = {
        "--model": scene.folder,
        "--golden": scene.golden.directory,
        "--tp-degree": tp_degree,
        "--backend": backend,
        "--sites": "all",
        "--output-dir": directory,
    }
    words = [str(word) for option in options.items() for word in option]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "neuron", "sweep", *words, "--json", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
        cwd=_ROOT,
        env=environment,
    )
    if done.returncode not in (0, 1):
        raise BackendError(f"{tp_degree} ranks did not run", found=done.stderr[-500:])
    return Capture.open(directory)


def _run(scene: Scene, target: Target, run: Run, *, runtime: Runtime, directory: Path) -> Capture:
    shutil.rmtree(directory, ignore_errors=True)
    request = DeviceRequest(
        folder=scene.folder,
        spec=scene.spec,
        model_source=str(scene.folder),
        run=run,
        inputs=scene.inputs,
        dtype=torch.bfloat16,
        target=target,
        golden=scene.golden,
    )
    DeviceRun(request, runtime=runtime, reader=scene.reader).capture(directory)
    return Capture.open(directory)
