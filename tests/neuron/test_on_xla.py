"""Runs on XLA, all in one process that compiles them: the device layer, decoding, profiles, weights prepared ahead."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.capture.manifest import Manifest
from neuron.runs.run_profile import RunProfile

Results = dict[str, dict[str, Any]]
Serve = Callable[..., list[dict[str, Any]]]

PRESETS: dict[str, tuple[object, ...]] = {
    "sweep": ("sweep",),
    "full": ("full",),
    "multi-layer": ("multi-layer", "--layers", "1:4"),
    "single-layer": ("single-layer", "--layer", 2),
    "component": ("component", "--layer", 1, "--component", "experts"),
}

MOST_GRAPHS = 3

PORTS = """
from torch import nn
from neuron.builtin.layer import DeviceLayer

class FailsAtLayer2(DeviceLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx == 2:
            raise ValueError("no such layer")
        return super().convert_state_dict(tensors, config, layer_idx)

class BuiltPerLayer(DeviceLayer):
    reuse = False

class Small(nn.Module):
    sites = {}

    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx

    def convert_state_dict(self, tensors, config, layer_idx):
        return {}

class NumberOfTheLayer(Small):
    def forward(self, hidden_states, attention_mask, position_ids):
        return hidden_states * (1 + self.layer_idx)

class Fallback(Small):
    def forward(self, hidden_states, attention_mask, position_ids):
        return hidden_states * hidden_states.float().mean().item()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all captures, each under the name of its run."""
    return tmp_path_factory.mktemp("on_xla")


@pytest.fixture(scope="module")
def on_xla(
    needs_xla: None,
    serve: Serve,
    write_chunked_port: Callable[..., str],
    small: Path,
    small_fp8: Path,
    small_golden: Path,
    folder: Path,
) -> Results:
    """Runs that are fast, one after the other in one process: on the small model, then on the one with a golden."""
    (folder / "ports.py").write_text(PORTS)
    targets = {
        name: ("--target", f"{folder / 'ports.py'}:{name}")
        for name in ("FailsAtLayer2", "BuiltPerLayer", "NumberOfTheLayer", "Fallback")
    }
    layers = ("multi-layer", "--model", small, "--layers")
    judged = ("sweep", "--layers", "1:3", "--model", small_fp8, "--golden", small_golden, "--json")
    return serve_on_xla(
        serve,
        folder,
        {
            # The first of its shapes: it compiles.
            "profiled": (*layers, "0:2", "--seq-len", "12,7", "--profile"),
            "decoded": (*layers, "0:3", "--seq-len", "9,5", "--json", "--decode", 3),
            "prepared": (*layers, "0:4", "--seq-len", "12,7", "--debug", "--prefetch"),
            "plain": (*layers, "0:4", "--seq-len", "12,7", "--debug", "--no-prefetch"),
            "failing": (
                *(*layers, "0:4", "--seq-len", "12,7", "--debug", "--prefetch"),
                *targets["FailsAtLayer2"],
            ),
            # Each is the first of its shapes again.
            "two": (*layers, "0:2", "--seq-len", "10,4", "--json"),
            "four": (*layers, "0:4", "--seq-len", "11,4", "--json"),
            # Of the shapes before.
            "built per layer": (*layers, "0:4", "--seq-len", "11,4", "--json", *targets["BuiltPerLayer"]),
            "number": (*layers, "0:2", "--seq-len", "9,4", *targets["NumberOfTheLayer"]),
            "fallback": (*layers, "0:2", "--seq-len", "9,4", *targets["Fallback"]),
            "sweep": judged,
            "chunked": (*judged, "--target", write_chunked_port(2, num_chunks=4)),
        },
        # Neither the time of compiling nor that of a graph is judged: the compiler need not try.
        XLA_FLAGS="--xla_backend_optimization_level=0",
        # Whatever the user's variable says, xla-cpu was asked for.
        PJRT_DEVICE="TPU",
    )


@pytest.fixture(scope="module")
def every_preset(
    needs_xla: None,
    serve: Serve,
    toy: Path,
    golden: Path,
    small_fp8: Path,
    float32_golden: Path,
    folder: Path,
) -> Results:
    """The presets and a run in float32, compiled as a user's are."""
    common = ("--model", toy, "--json", "--golden")
    runs = {name: (*preset, *common, golden) for name, preset in PRESETS.items()}
    exact = ("--model", small_fp8, "--json", "--golden", float32_golden, "--dtype", "float32")
    runs["float32"] = ("full", *exact)
    return serve_on_xla(serve, folder / "presets", runs)


def serve_on_xla(
    serve: Serve, folder: Path, runs: dict[str, tuple[object, ...]], **environment: str
) -> Results:
    places = {name: ("--backend", "xla-cpu", "--output-dir", folder / name) for name in runs}
    results = serve([(*runs[name], *places[name]) for name in runs], **environment)
    return dict(zip(runs, results, strict=True))


def assert_passes(result: dict[str, Any]) -> None:
    record = json.loads(result["stdout"])
    assert (result["exit_code"], record["verdict"]) == (0, "pass")
    assert record["compared"] == record["of"] > 0
    assert record["description"]["provenance"]["backend"] == "xla-cpu"


def test_builtin_passes(on_xla: Results) -> None:
    assert_passes(on_xla["sweep"])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PRESETS))
def test_builtin_passes_every_preset(every_preset: Results, name: str) -> None:
    assert_passes(every_preset[name])


def test_xla_on_the_cpu_opens_as_itself_and_is_never_called_neuron(on_xla: Results) -> None:
    for name in ("decoded", "sweep", "chunked"):
        provenance = json.loads(on_xla[name]["stdout"])["description"]["provenance"]
        assert (provenance["backend"], provenance["environment"]["PJRT_DEVICE"]) == ("xla-cpu", "CPU")
        assert "neuron" not in f"{provenance['backend']} {provenance['device']}".lower()


@pytest.mark.slow
def test_float32_agrees_with_transformers(every_preset: Results) -> None:
    record = json.loads(every_preset["float32"]["stdout"])
    assert record["verdict"] == "pass"
    # As near as on the CPU.
    assert max(site["metrics"]["relative_l2"] for site in record["sites"] if site["routing"] is None) <= 1e-5


def test_chunks_share_their_graphs(on_xla: Results) -> None:
    chunked, whole = (json.loads(on_xla[name]["stdout"]) for name in ("chunked", "sweep"))
    assert chunked["verdict"] == "pass"
    # The expert chunk's graph has other shapes than that of one chunk; the others were compiled before.
    assert 0 < chunked["graphs"]["first_layer"] <= whole["graphs"]["first_layer"]
    assert chunked["graphs"]["later_layers"] == 0


def graphs(result: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Return the numbers of graphs for the first layer and later, and the operations that fell back to the CPU."""
    assert result["exit_code"] == 0, result["stderr"]
    found = json.loads(result["stdout"])["graphs"]
    return found["first_layer"], found["later_layers"], found["fallbacks"]


def test_graphs_are_few_and_all_of_the_first_layer_whatever_the_number_of_layers(on_xla: Results) -> None:
    first_layer, later_layers, fallbacks = graphs(on_xla["two"])
    assert 0 < first_layer <= MOST_GRAPHS
    assert (later_layers, fallbacks) == (0, [])
    assert graphs(on_xla["four"]) == graphs(on_xla["two"])
    assert "warning" not in on_xla["four"]["stderr"]
    # A layer that is built anew has the graphs of the one before.
    assert graphs(on_xla["built per layer"]) == (0, 0, [])
    # A step compiles as much as the whole pass.
    assert graphs(on_xla["decoded"]) == (6, 0, [])


def test_graph_that_depends_on_the_layer_and_operation_on_the_cpu_are_warned_of(on_xla: Results) -> None:
    number = on_xla["number"]
    found = re.search(r"graphs compiled: \d+ for the first layer, (\d+) after it", number["stdout"])
    assert found is not None
    assert int(found[1]) > 0
    assert "warning: a graph depends on the layer" in number["stderr"]
    fallback = "warning: aten::_local_scalar_dense ran on the CPU instead of the device"
    assert fallback in on_xla["fallback"]["stderr"]


def test_compiling_and_sending_are_told_apart(on_xla: Results, folder: Path) -> None:
    assert on_xla["profiled"]["exit_code"] == 0, on_xla["profiled"]["stderr"]
    first, second = RunProfile.read(folder / "profiled").layers
    assert first.times.compile_s > 0.0
    assert second.times.compile_s == 0.0
    assert min(first.times.transfer_s, second.times.transfer_s) > 0.0


def test_weights_of_the_next_layer_are_prepared_while_a_device_computes(
    on_xla: Results, folder: Path
) -> None:
    told = [line for line in on_xla["prepared"]["stderr"].splitlines() if line.startswith("Preparing")]
    assert told == [f"Preparing layer {layer}" for layer in (1, 2, 3)]
    assert "Preparing" not in on_xla["plain"]["stderr"]
    # What is wrong with the weights of a layer ends the run at that layer, and not at the one before.
    failing = on_xla["failing"]
    assert failing["exit_code"] == 3
    assert "layer 2: convert_state_dict failed" in failing["stderr"]
    # A port's own conversion may write to the module, which is still to run: it waits for its layer.
    assert "Preparing" not in failing["stderr"]
    assert Manifest.read(folder / "failing").complete_layers == (0, 1)
