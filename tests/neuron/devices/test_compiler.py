"""Layers run by torch.compile on the CPU: the same values in one graph, and what breaks or repeats it is told."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.backends.registry import register_backend

from minimax_tools.errors import TargetError, UsageError
from neuron.devices.backend import Backend
from neuron.devices.compiler import CompileCounts, Compiler, GraphBreak, choose_compiler, count_torch_compiles

REPOSITORY = Path(__file__).parents[3]
EVERY_SITE = f"{REPOSITORY / 'scripts/examples/port.py'}:DecoderLayer"

Runs = dict[str, dict[str, Any]]

PORTS = """
from neuron.builtin.layer import DeviceLayer


class Printing(DeviceLayer):
    def forward(self, hidden_states, attention_mask, position_ids):
        print("running")
        return super().forward(hidden_states, attention_mask, position_ids)


class NumberOfTheLayer(DeviceLayer):
    reuse = False

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx

    def forward(self, hidden_states, attention_mask, position_ids):
        return super().forward(hidden_states * (1 + self.layer_idx), attention_mask, position_ids)


class ReadsAValue(DeviceLayer):
    def forward(self, hidden_states, attention_mask, position_ids):
        if hidden_states.abs().max().item() > 1e9:
            hidden_states = hidden_states * 2
        return super().forward(hidden_states, attention_mask, position_ids)


class BuiltPerLayer(DeviceLayer):
    reuse = False


class Broken(DeviceLayer):
    def forward(self, hidden_states, attention_mask, position_ids):
        return hidden_states @ hidden_states
"""


def run_two_layers(serve: Any, model: Path, folder: Path, **runs: tuple[object, ...]) -> dict[str, Any]:
    """Run layers 0 and 1 from tokens: for each name a target, its compiler and options. All run in one process."""
    (folder / "ports.py").write_text(PORTS)
    commands = []
    for name, (target, compiler, *options) in runs.items():
        target = f"{folder / 'ports.py'}:{target}" if f"class {target}(" in PORTS else target
        place = ("--model", model, "--target", target, "--backend", "cpu", "--compile", compiler)
        where = ("--layers", "0:2", "--seq-len", "12,7", "--json", "--output-dir", folder / name)
        commands.append(["multi-layer", *place, *where, *options])
    return dict(zip(runs, serve(commands), strict=True))


@pytest.fixture(scope="module")
def compiled(serve: Any, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of one process, by name."""
    return run_two_layers(
        serve,
        small,
        tmp_path_factory.mktemp("compiled"),
        off=(EVERY_SITE, "off"),
        eager=(EVERY_SITE, "eager"),
        printing=("Printing", "eager"),
    )


@pytest.fixture(scope="module")
def further(serve: Any, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """More runs of one process, by name."""
    return run_two_layers(
        serve,
        small,
        tmp_path_factory.mktemp("further"),
        off=(EVERY_SITE, "off"),
        aot_eager=(EVERY_SITE, "aot_eager"),
        item=("ReadsAValue", "eager"),
        number=("NumberOfTheLayer", "eager"),
        anew=("BuiltPerLayer", "eager"),
        broken=("Broken", "eager"),
        checked=("builtin", "aot_eager", "--check-capture"),
    )


def record(result: dict[str, Any]) -> dict[str, Any]:
    assert result["exit_code"] == 0, result["stderr"]
    found: dict[str, Any] = json.loads(result["stdout"])
    return found


def sites(result: dict[str, Any], layer: int) -> dict[str, torch.Tensor]:
    return load_file(Path(record(result)["directory"]) / f"layer_{layer}.safetensors")


def differing_sites(runs: Runs, one: str, other: str) -> list[str]:
    """The sites of both layers that differ between two runs, in any bit."""
    pairs = [(sites(runs[one], layer), sites(runs[other], layer)) for layer in (0, 1)]
    for expected, found in pairs:
        assert set(found) == set(expected)
        assert len(found) >= 17
    return [name for expected, found in pairs for name in expected if not found[name].equal(expected[name])]


class TestValues:
    def test_every_site_is_that_of_the_layer_uncompiled(self, compiled: Runs) -> None:
        assert differing_sites(compiled, "off", "eager") == []

    @pytest.mark.slow
    def test_every_site_is_the_same_through_aten_graphs_and_where_recording_is_checked(
        self, further: Runs
    ) -> None:
        assert differing_sites(further, "off", "aot_eager") == []
        # A layer whose recording is checked is compiled without its sites too.
        found = record(further["checked"])
        assert (found["graphs"]["first_layer"], found["graphs"]["later_layers"]) == (2, 0)
        assert all(effect["num_changed"] == 0 for effect in found["capture_effects"])

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler: apt install g++")
    def test_inductor_passes_against_the_golden_in_one_graph(
        self, process: Any, toy: Path, golden: Path
    ) -> None:
        done = process(
            *("sweep", "--model", toy, "--golden", golden, "--target", EVERY_SITE, "--backend", "cpu"),
            *("--compile", "inductor", "--json"),
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["verdict"], told["compared"]) == ("pass", told["of"])
        assert (told["graphs"]["first_layer"], told["graphs"]["later_layers"]) == (1, 0)


class TestGraphs:
    def test_resident_layer_takes_one_graph_for_all_layers_where_it_is_asked_for(
        self, compiled: Runs
    ) -> None:
        told = {name: record(compiled[name]) for name in ("off", "eager")}
        counted = {
            name: [one["graphs"][key] for key in ("compiler", "first_layer", "later_layers")]
            for name, one in told.items()
        }
        assert counted == {"off": [None, 0, 0], "eager": ["eager", 1, 0]}
        graphs = told["eager"]["graphs"]
        assert (graphs["graph_breaks"], graphs["recompiles"]) == ([], [])
        for name, compiler in (("off", None), ("eager", "eager")):
            manifest = json.loads((Path(told[name]["directory"]) / "manifest.json").read_text())
            assert manifest["provenance"]["options"].get("compile") == compiler

    def test_line_that_breaks_the_graph_is_named_with_torchs_reason(self, compiled: Runs) -> None:
        (found,) = record(compiled["printing"])["graphs"]["graph_breaks"]
        assert found["place"] == 'ports.py:7 `print("running")`'
        assert "builtin" in found["reason"]

    @pytest.mark.slow
    def test_value_that_is_read_breaks_the_graph_and_makes_others(self, further: Runs) -> None:
        graphs = record(further["item"])["graphs"]
        (found,) = graphs["graph_breaks"]
        assert found["place"].startswith("ports.py:24 `if hidden_states.abs().max().item() > 1e9:")
        assert "item()" in found["reason"]
        assert graphs["first_layer"] > 1

    @pytest.mark.slow
    def test_number_of_the_layer_makes_a_graph_for_each_and_is_named(self, further: Runs) -> None:
        graphs = record(further["number"])["graphs"]
        assert graphs["later_layers"] == 1
        assert "layer_idx == 0" in graphs["recompiles"][0]
        # Layers that are built anew share a graph.
        assert record(further["anew"])["graphs"]["later_layers"] == 0

    @pytest.mark.slow
    def test_layer_that_does_not_compile_ends_the_run_and_names_the_compiler(self, further: Runs) -> None:
        result = further["broken"]
        assert result["exit_code"] == 3
        assert "layer 0 cannot be compiled by torch.compile for eager" in result["stderr"]
        assert "--compile off runs it operation by operation" in result["stderr"]


class TestFailures:
    def test_reason_is_the_compilers_own(self) -> None:
        # Under TorchNeuron's name. torch wraps its error in one of its own.
        def fail(graph: object, inputs: object, **options: object) -> None:
            raise ValueError("a tensor of 4.5 GB is too large\nsee the log")

        register_backend(compiler_fn=fail, name="neuron")
        run = Compiler.NEURON.compile(nn.Linear(2, 2), what="layer 3")
        with pytest.raises(TargetError) as caught:
            run(torch.zeros(1, 2))
        assert "layer 3 cannot be compiled by torch.compile for neuron" in str(caught.value)
        assert "found ValueError: a tensor of 4.5 GB is too large. " in str(caught.value)

    def test_shapes_that_do_not_fit_are_named(self) -> None:
        run = Compiler.EAGER.compile(nn.Linear(2, 2), what="layer 3")
        with pytest.raises(TargetError, match=r"found TorchRuntimeError: .*size=\(1, 5\)"):
            run(torch.zeros(1, 5))


def test_graph_for_each_of_many_layers_is_compiled_and_counted() -> None:
    """torch's own limit is 8 graphs of one function."""

    class Numbered(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states * self.number

    before, start_s = count_torch_compiles(), time.monotonic()
    for number in range(10):
        run = Compiler.EAGER.compile(Numbered(number), what="the layer")
        assert run(torch.ones(2)).tolist() == [number, number]
    grown, wall_s = count_torch_compiles().since(before), time.monotonic() - start_s
    assert (grown.compiles, sum(grown.recompiles.values())) == (10, 9)
    assert any("number == 0" in reason for reason in grown.recompiles)
    assert 0.0 < grown.seconds < wall_s


class TestChoice:
    @pytest.mark.parametrize(
        ("name", "backend", "chosen"),
        [
            ("auto", Backend.NEURON, Compiler.NEURON),
            ("auto", Backend.CPU, None),
            ("auto", Backend.XLA_CPU, None),
            ("off", Backend.NEURON, None),
            ("off", Backend.NEURON_XLA, None),
            ("aot_eager", Backend.NEURON, Compiler.AOT_EAGER),
            ("inductor", Backend.CPU, Compiler.INDUCTOR),
        ],
    )
    def test_compiler_goes_with_the_backend(
        self, name: str, backend: Backend, chosen: Compiler | None
    ) -> None:
        assert choose_compiler(name, backend) is chosen

    @pytest.mark.parametrize(
        ("name", "backend", "message"),
        [
            ("eager", Backend.XLA_CPU, "--compile eager does not go with the backend xla-cpu"),
            ("neuron", Backend.CPU, "--compile neuron makes no graphs for the backend cpu"),
            ("inductor", Backend.NEURON, "--compile inductor makes no graphs for the backend neuron"),
        ],
    )
    def test_compiler_that_the_backend_does_not_have_is_refused(
        self, name: str, backend: Backend, message: str
    ) -> None:
        with pytest.raises(UsageError, match=message):
            choose_compiler(name, backend)


def test_counts_since_an_earlier_time_are_what_came_after() -> None:
    here, there = GraphBreak(reason="print", place="port.py:3"), GraphBreak(reason="item")
    earlier = CompileCounts(
        compiles=1, fallbacks={"a": 2, "b": 1}, graph_breaks={here: 2}, recompiles={"a == 1": 1}
    )
    later = CompileCounts(
        compiles=2,
        fallbacks={"a": 2, "b": 4, "c": 1},
        graph_breaks={here: 2, there: 1},
        recompiles={"a == 1": 1, "a == 2": 1},
    )
    assert later.since(earlier) == CompileCounts(
        compiles=1, fallbacks={"b": 3, "c": 1}, graph_breaks={there: 1}, recompiles={"a == 2": 1}
    )
    assert str(there) == "an unknown line: item"
