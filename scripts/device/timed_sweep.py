"""A process that times a sweep, or a bare loop to compare the sweep with.

    python -m device.timed_sweep sweep|uncompared|bare|bare-loading MODEL GOLDEN OUTPUT

`uncompared` is a sweep that does not look at the weights that the port holds. `bare` runs all layers with the weights
of layer 0, `bare-loading` loads each layer's. Prints one JSON object: seconds, processor time, the seconds spent
compiling, and for a sweep its numbers of graphs. A sweep is timed as a whole, a bare loop from its first layer on: it
writes no OUTPUT, and the golden's inputs are read before, and for `bare` the weights too. On a busy machine the
processor time (`cpu_s`, of all threads) tells more than the seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from port_runs import request_run
from torch import nn

from compare.catalogue.undo import Undo
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from neuron.devices.runtime import Runtime, open_runtime
from neuron.devices.weights import WeightLoader
from neuron.ports.targets import find_target
from neuron.runs.port_setup import TensorEdit
from neuron.runs.runner import DeviceRun


def main(way: str, model: str, golden: str, output: str) -> None:
    """Run one of the ways, and print its times."""
    folder = Path(model)
    with open_runtime("xla-cpu") as runtime, CheckpointReader(folder) as reader:
        if way in ("sweep", "uncompared"):
            # Weights in which a mistake is undone are not compared. To undo this one changes nothing.
            edits = (
                {"k_norm_scaled": Undo.parse("k_norm_scaled,factor=1").edit} if way == "uncompared" else {}
            )
            record = _sweep(runtime, reader, Capture.open(Path(golden)), Path(output), edits=edits)
        else:
            loads = {"bare": False, "bare-loading": True}[way]
            record = _run_bare(runtime, reader, Capture.open(Path(golden)), loads=loads)
        record["compile_s"] = runtime.count_compiles().seconds
    print(json.dumps(record))


def _sweep(
    runtime: Runtime,
    reader: CheckpointReader,
    golden: Capture,
    output: Path,
    *,
    edits: Mapping[str, TensorEdit],
) -> dict[str, float]:
    started, started_cpu = time.perf_counter(), time.process_time()
    run = sweep_run(Span(0, len(golden.layers)), sites_level="all")
    request = replace(request_run(reader.folder, golden, find_target("builtin"), run), edits=edits)
    report = DeviceRun(request, runtime=runtime, reader=reader).capture(output)
    return {
        "seconds": time.perf_counter() - started,
        "cpu_s": time.process_time() - started_cpu,
        "first_layer": report.compiles.first_layer,
        "later_layers": report.compiles.later_layers,
    }


def _run_bare(
    runtime: Runtime, reader: CheckpointReader, golden: Capture, *, loads: bool
) -> dict[str, float]:
    """Run the bare loop: do no more than it takes to get each layer's output to the host."""
    spec, target = ModelSpec.from_folder(reader.folder), find_target("builtin")
    with ReadingPool(torch.get_num_threads()) as pool:
        loader = WeightLoader(runtime.device, wait=runtime.synchronise, pool=pool)
        module = target.build(spec, 0, dtype=torch.bfloat16)

        def load(layer: int) -> None:
            tensors = LayerTensors.open(reader, spec, layer, torch.bfloat16)
            target.load(module, tensors, spec, loader=loader)

        inputs = golden.read_inputs()
        states = [golden.read(layer, Site.INPUT) for layer in range(spec.num_hidden_layers)]
        if not loads:
            load(0)
        started, started_cpu = time.perf_counter(), time.process_time()
        for layer, hidden_states in enumerate(states):
            if loads:
                load(layer)
            _step(module, runtime, inputs, hidden_states)
        return {
            "seconds": time.perf_counter() - started,
            "cpu_s": time.process_time() - started_cpu,
        }


def _step(module: nn.Module, runtime: Runtime, inputs: Inputs, hidden_states: torch.Tensor) -> torch.Tensor:
    """Run a layer, and copy its output to the host."""
    device = runtime.device
    with torch.no_grad():
        output, _ = module(
            hidden_states.to(device), inputs.attention_mask.to(device), inputs.position_ids.to(device)
        )
    runtime.synchronise()
    on_host: torch.Tensor = output.to("cpu")
    return on_host


if __name__ == "__main__":
    main(*sys.argv[1:])
