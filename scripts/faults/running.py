"""Ports run over all layers of a scene, isolated or chained."""

from __future__ import annotations

from pathlib import Path

import port_runs

from faults.scene import Scene
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import full_run, sweep_run
from minimax_tools.model.span import Span
from neuron.devices.runtime import Runtime
from neuron.ports.targets import Target


def run_port(
    scene: Scene, target: Target, *, runtime: Runtime, directory: Path, decode_rows: int = 0
) -> Capture:
    """Sweep all layers in this process.

    Args:
        scene: Model and golden.
        target: The port.
        runtime: The device.
        directory: The capture's directory; it is emptied first.
        decode_rows: Number of rows of each prompt that are decoded.
    """
    run = sweep_run(Span(0, scene.spec.num_hidden_layers), sites_level="all").decoding(decode_rows)
    return port_runs.run_port(
        scene.golden, target, run, reader=scene.reader, runtime=runtime, directory=directory
    )


def run_whole_model(scene: Scene, target: Target, *, runtime: Runtime, directory: Path) -> Capture:
    """Run all layers chained, from the embedding to the logits; `directory` is emptied first."""
    run = full_run(scene.spec.num_hidden_layers, sites_level="all")
    return port_runs.run_port(
        scene.golden, target, run, reader=scene.reader, runtime=runtime, directory=directory
    )
