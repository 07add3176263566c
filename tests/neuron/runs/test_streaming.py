"""Runs with one layer in memory: same values with and without reading ahead, nothing read twice, budgets kept."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.shard_files import stored_layer_bytes
from minimax_tools.errors import TargetError
from minimax_tools.machine.memory import MemoryBudget, MemoryBudgetError, MemoryUsage, give_back_freed_memory
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Run, full_run, multi_layer_run
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EMBEDDING, FINAL_NORM, LM_HEAD, layer_bytes, vocabulary_bytes
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs
from neuron.devices.backend import Backend
from neuron.devices.runtime import open_runtime
from neuron.ports.targets import find_target
from neuron.runs.device_request import DeviceRequest
from neuron.runs.resident_layer import DeviceFootprint, choose_read_ahead
from neuron.runs.runner import DeviceRun

CONVERTING_PORT = Path(__file__).parents[3] / "scripts" / "examples" / "port.py"
TARGETS = {"builtin": "builtin", "reference": "reference", "converting": f"{CONVERTING_PORT}:DecoderLayer"}
MB = 1_000_000

# Of the wide model: so many tokens that the logits take 280 MB; what is left for all but them.
MANY, MANY_BUT_LOGITS = (200,), 200 * MB

# Fails at the layer that a variable names: the source stays the same.
STUMBLING = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx

    def forward(self, *arguments):
        if os.environ.get("FAIL_AT") == str(self.layer_idx):
            raise RuntimeError("out of luck")
        return super().forward(*arguments)
"""

# Runs commands in a process of its own; prints the anonymous memory before each, and at the most. A command that
# comes with a number gets a budget of so much more than is held before.
MEASURED = """
import json, sys
import click.testing
from minimax_tools.machine.memory_tracker import MemoryTracker
from minimax_tools.machine.memory import give_back_freed_memory
from neuron.cli import main
results = []
for arguments, allowed in json.loads(sys.argv[1]):
    give_back_freed_memory()
    with MemoryTracker(interval_s=0.002) as tracker:
        before = tracker.snapshot("before").usage.anonymous_bytes
        budget = [] if allowed is None else ["--memory-budget", f"{before + allowed}B"]
        result = click.testing.CliRunner().invoke(main, [*arguments, *budget])
    results.append({"exit_code": result.exit_code, "stderr": result.stderr,
                    "taken": tracker.peak.anonymous_bytes - before})
print(json.dumps(results))
"""


class Watcher:
    """Keeps what a run tells of its layers."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, int]] = []
        self.skipped: list[int] = []

    def advance(self, layer: int, *, num_bytes: int) -> None:
        self.ran.append((layer, num_bytes))

    def skip(self, layer: int) -> None:
        self.skipped.append(layer)


@contextlib.contextmanager
def device_run(
    folder: Path,
    run: Run,
    *,
    target: str = "builtin",
    progress: Watcher | None = None,
    lengths: tuple[int, ...] = (9, 4),
    **choices: Any,
) -> Iterator[tuple[DeviceRun, CheckpointReader]]:
    """A run on the CPU, from tokens."""
    spec = ModelSpec.from_folder(folder)
    request = DeviceRequest(
        folder=folder,
        spec=spec,
        model_source="a model",
        run=run,
        inputs=build_inputs(InputRequest(seq_lens=lengths), folder=folder, spec=spec),
        dtype=torch.bfloat16,
        target=find_target(target),
        **choices,
    )
    with open_runtime("cpu") as runtime, CheckpointReader(folder) as reader:
        yield DeviceRun(request, runtime=runtime, reader=reader, progress=progress), reader


def run_within(left_bytes: int, folder: Path, directory: Path, run: Run, **choices: Any) -> None:
    """Run with a budget of so much more than the process holds already."""
    # What earlier tests freed could be taken anew for nothing.
    give_back_freed_memory()
    budget = MemoryBudget(MemoryUsage.on_host().anonymous_bytes + left_bytes)
    with device_run(folder, run, budget=budget, **choices) as (started, _):
        started.capture(directory)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a vocabulary of 51 MB in BF16."""
    folder = tmp_path_factory.mktemp("wide") / "wide"
    model = SyntheticModel(num_hidden_layers=2, vocab_size=100_000)
    synthesize(folder, model=model, dtype=torch.bfloat16, shard_size_bytes=None, seed=0)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 107 MB in BF16, stored as FP8."""
    folder = tmp_path_factory.mktemp("large") / "large"
    model = SyntheticModel(
        num_hidden_layers=2,
        hidden_size=1024,
        num_attention_heads=8,
        head_dim=128,
        num_local_experts=32,
        intermediate_size=512,
        vocab_size=30_000,
    )
    synthesize(folder, model=model, dtype=torch.float8_e4m3fn, shard_size_bytes=None, seed=0)
    return folder


class TestReadingAhead:
    @pytest.mark.parametrize(
        "target", ["builtin", pytest.param("reference", marks=pytest.mark.slow), "converting"]
    )
    def test_changes_no_bit_on_the_cpu(self, run: Any, small: Path, tmp_path: Path, target: str) -> None:
        common = ("full", "--model", small, "--seq-len", "12,7", "--target", TARGETS[target])
        for option in ("--prefetch", "--no-prefetch"):
            result = run(*common, option, "--output-dir", tmp_path / option)
            assert result.exit_code == 0, result.stderr
        assert contents(tmp_path / "--prefetch") == contents(tmp_path / "--no-prefetch")

    def test_begins_with_the_next_layer_of_the_run_while_one_runs(self, run: Any, small: Path) -> None:
        common = ("multi-layer", "--layers", "1:3", "--model", small, "--seq-len", 9, "--debug")
        lines = run(*common, "--prefetch").stderr.splitlines()
        told = [line for line in lines if line.startswith(("Reading", "Layer"))]
        words = [line.split(" (")[0].rstrip(".") for line in told]
        # The layers before the span make its input; no layer follows the last one of the run.
        assert words == [
            "Reading layer 0 ahead",
            "Reading layer 1 ahead",
            "Layer 0",
            "Reading layer 2 ahead",
            "Layer 1",
            "Layer 2",
        ]
        assert "ahead" not in run(*common, "--no-prefetch").stderr

    @pytest.mark.slow
    def test_changes_no_bit_and_compiles_no_graph_on_xla(
        self, needs_xla: None, serve: Any, small: Path, tmp_path: Path
    ) -> None:
        common: tuple[object, ...] = ("multi-layer", "--layers", "0:3")
        common += ("--model", small, "--seq-len", "12,7", "--backend", "xla-cpu")
        runs = [(target, option) for target in TARGETS for option in ("--prefetch", "--no-prefetch")]
        directories = [tmp_path / f"{target}{option}" for target, option in runs]
        results = serve(
            [
                (*common, "--target", TARGETS[target], option, "--output-dir", directory, "--json")
                for (target, option), directory in zip(runs, directories, strict=True)
            ],
            # Graphs are counted, not timed: the compiler need not try.
            XLA_FLAGS="--xla_backend_optimization_level=0",
        )
        graphs = [json.loads(result["stdout"])["graphs"] for result in results]
        for (_, option), counted in zip(runs, graphs, strict=True):
            # The second run of a target finds what the first compiled.
            assert (counted["first_layer"] > 0) is (option == "--prefetch")
            assert (counted["later_layers"], counted["fallbacks"]) == (0, [])
        for prefetched, plain in zip(directories[::2], directories[1::2], strict=True):
            assert contents(prefetched) == contents(plain)

    def test_where_the_cpu_computes_nothing_is_prepared(self, run: Any, small: Path) -> None:
        common = ("multi-layer", "--layers", "0:2", "--model", small, "--seq-len", 9, "--debug", "--prefetch")
        assert "Preparing" not in run(*common).stderr

    def test_counts_nothing_twice(self, small: Path, tmp_path: Path) -> None:
        counts = []
        for prefetch in (True, False):
            with device_run(small, full_run(4, sites_level="layer"), prefetch=prefetch) as (run, reader):
                run.capture(tmp_path / str(prefetch))
                counts.append(reader.num_bytes_read)
        assert counts[0] == counts[1]

    @pytest.mark.slow
    def test_is_off_by_itself_where_memory_does_not_hold_it_and_says_so(
        self, toy: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with CheckpointReader(toy) as reader:
            small, vast = (footprint(toy, length=length) for length in (8, 1_000_000_000))
            logger = logging.getLogger("neuron.runs.resident_layer")
            # Whatever a command has set up before.
            monkeypatch.setattr(logger, "handlers", [caplog.handler])
            monkeypatch.setattr(logger, "level", logging.INFO)
            assert choose_read_ahead(None, small, reader.index)
            assert caplog.messages == []
            assert not choose_read_ahead(None, vast, reader.index)
            assert "No layer is read ahead" in caplog.messages[0]
            assert choose_read_ahead(True, vast, reader.index)
            assert not choose_read_ahead(False, small, reader.index)


def footprint(folder: Path, *, length: int, backend: Backend = Backend.CPU) -> DeviceFootprint:
    ids = torch.zeros(1, 1, dtype=torch.int64).expand(1, length)
    return DeviceFootprint(
        spec=ModelSpec.from_folder(folder),
        dtype=torch.bfloat16,
        inputs=Inputs(input_ids=ids, attention_mask=ids, position_ids=ids, source="zeros"),
        backend=backend,
        num_experts_at_once=1,
    )


class TestProgress:
    def test_tells_each_layer_with_the_bytes_read_for_it(self, toy: Path, tmp_path: Path) -> None:
        watcher = Watcher()
        with device_run(toy, full_run(4, sites_level="layer"), progress=watcher) as (run, reader):
            run.capture(tmp_path / "run")
            embedding = reader.index[EMBEDDING].size_bytes
            stored = [stored_layer_bytes(reader.index, layer) for layer in range(4)]
        assert watcher.ran == [(0, stored[0] + embedding), *((layer, stored[layer]) for layer in (1, 2, 3))]

    def test_is_silent_where_asked(self, run: Any, toy: Path) -> None:
        assert run("multi-layer", "--layers", "0:2", "--model", toy, "--seq-len", 9, "--quiet").stderr == ""


class TestResumption:
    """By the bytes that are read: a finished layer's are not among them."""

    @pytest.fixture
    def stumble(
        self, write_port: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Callable[..., tuple[Watcher, int]]:
        """Runs until it fails at a layer, then goes on; what the second run told, and the bytes it read.

        Between the two a change may be made in the run's folder; it returns the model that goes on.
        """
        target = write_port(STUMBLING)

        def run_twice(
            folder: Path, run: Run, layer: int, change: Callable[[Path], Path] | None = None
        ) -> tuple[Watcher, int]:
            monkeypatch.setenv("FAIL_AT", str(layer))
            with device_run(folder, run, target=target) as (failing, _), pytest.raises(TargetError):
                failing.capture(tmp_path / "run")
            monkeypatch.delenv("FAIL_AT")
            watcher = Watcher()
            folder = folder if change is None else change(tmp_path / "run")
            with device_run(folder, run, target=target, progress=watcher) as (resumed, reader):
                resumed.capture(tmp_path / "run")
            return watcher, reader.num_bytes_read

        return run_twice

    def test_whole_model_goes_on_from_the_stored_output(self, stumble: Any, toy: Path) -> None:
        watcher, num_bytes = stumble(toy, full_run(4, sites_level="layer"), 2)
        assert watcher.skipped == [0, 1]
        assert [layer for layer, _ in watcher.ran] == [2, 3]
        with CheckpointReader(toy) as reader:
            head = sum(reader.index[name].size_bytes for name in (FINAL_NORM, LM_HEAD))
            layers = sum(stored_layer_bytes(reader.index, layer) for layer in (2, 3))
        assert num_bytes == fingerprint_bytes(toy, Span(0, 4)) + layers + head

    def test_span_in_mid_model_does_not_run_the_layers_before_again(self, stumble: Any, toy: Path) -> None:
        watcher, num_bytes = stumble(toy, multi_layer_run(Span(1, 4), sites_level="layer"), 3)
        assert watcher.skipped == [0, 1, 2]
        assert [layer for layer, _ in watcher.ran] == [3]
        with CheckpointReader(toy) as reader:
            layers = stored_layer_bytes(reader.index, 3)
        fingerprints = fingerprint_bytes(toy, Span(1, 4)) + fingerprint_bytes(toy, Span(0, 1))
        assert num_bytes == fingerprints + layers

    def test_span_whose_first_layer_failed_runs_those_before_again(self, stumble: Any, toy: Path) -> None:
        watcher, _ = stumble(toy, multi_layer_run(Span(2, 4), sites_level="layer"), 2)
        assert (watcher.skipped, [layer for layer, _ in watcher.ran]) == ([], [0, 1, 2, 3])

    def test_head_that_failed_is_all_that_is_left(self, wide: Path, tmp_path: Path) -> None:
        run, directory = full_run(2, sites_level="layer"), tmp_path / "run"
        with pytest.raises(MemoryBudgetError, match="the lm_head and its logits would break"):
            run_within(MANY_BUT_LOGITS, wide, directory, run, lengths=MANY)
        assert {path.name for path in directory.glob("layer_*")} == {
            "layer_0.safetensors",
            "layer_1.safetensors",
        }
        watcher = Watcher()
        with device_run(wide, run, lengths=MANY, progress=watcher) as (resumed, reader):
            resumed.capture(directory)
            head = sum(reader.index[name].size_bytes for name in (FINAL_NORM, LM_HEAD))
            assert reader.num_bytes_read == fingerprint_bytes(wide, Span(0, 2)) + head
        assert (watcher.skipped, watcher.ran) == ([0, 1], [])
        with device_run(wide, run, lengths=MANY) as (whole, _):
            whole.capture(tmp_path / "whole")
        assert contents(directory) == contents(tmp_path / "whole")

    def test_stored_input_that_the_first_layer_was_not_fed_is_not_gone_on_with(
        self, stumble: Any, toy: Path
    ) -> None:
        def spoil(directory: Path) -> Path:
            inputs = load_file(directory / "inputs.safetensors")
            inputs["hidden_states"][0, 0, 0] += 1
            save_file(inputs, directory / "inputs.safetensors")
            return toy

        watcher, _ = stumble(toy, multi_layer_run(Span(1, 4), sites_level="layer"), 3, spoil)
        assert (watcher.skipped, [layer for layer, _ in watcher.ran]) == ([], [0, 1, 2, 3])

    def test_other_layer_before_the_span_is_not_gone_on_behind(self, stumble: Any, small: Path) -> None:
        def change_model(directory: Path) -> Path:
            other = directory.parent / "other"
            shutil.copytree(small, other)
            norm = "model.layers.0.input_layernorm.weight"
            shard = TensorIndex.from_folder(other)[norm].file
            tensors = load_file(shard)
            tensors[norm] *= 2
            save_file(tensors, shard, metadata={"format": "pt"})
            return other

        watcher, _ = stumble(small, multi_layer_run(Span(1, 4), sites_level="layer"), 3, change_model)
        assert [layer for layer, _ in watcher.ran] == [0, 1, 2, 3]


def fingerprint_bytes(folder: Path, span: Span) -> int:
    """Return the number of bytes that the fingerprint reads."""
    with CheckpointReader(folder) as reader:
        fingerprint_model(reader, ModelSpec.from_folder(folder), span)
        return reader.num_bytes_read


class TestBudget:
    def test_is_kept_to_where_it_is_wide_enough(self, wide: Path, tmp_path: Path) -> None:
        run_within(600 * MB, wide, tmp_path / "run", full_run(2, sites_level="layer"))

    @pytest.mark.parametrize(
        ("left_bytes", "purpose"),
        [(30 * MB, "reading the embedding"), (60 * MB, "holding the weights of layer 0")],
    )
    def test_names_what_would_break_it(
        self, wide: Path, tmp_path: Path, left_bytes: int, purpose: str
    ) -> None:
        with pytest.raises(MemoryBudgetError, match=f"{purpose} would break the memory budget"):
            run_within(left_bytes, wide, tmp_path / "run", full_run(2, sites_level="layer"))

    def test_names_the_layer_whose_activations_would_break_it(self, toy: Path, tmp_path: Path) -> None:
        run = multi_layer_run(Span(0, 1), sites_level="layer")
        with pytest.raises(MemoryBudgetError, match="what layer 0 computes would break the memory budget"):
            run_within(150 * MB, toy, tmp_path / "run", run, lengths=(600,), random_input=True)

    def test_counts_what_a_port_converts_beside_its_module(self, large: Path, tmp_path: Path) -> None:
        run, layer = multi_layer_run(Span(0, 1), sites_level="layer"), footprint(large, length=9)
        # Half a layer more than loading needs. The module and its conversion need one layer more.
        left_bytes = layer.loaded_layer_bytes + layer.converted_bytes // 2
        with pytest.raises(MemoryBudgetError, match="what convert_state_dict makes of layer 0"):
            run_within(
                left_bytes, large, tmp_path / "run", run, target=TARGETS["converting"], random_input=True
            )

    def test_ends_the_command_with_exit_code_3(self, run: Any, toy: Path) -> None:
        result = run("full", "--model", toy, "--seq-len", 9, "--memory-budget", "1MB")
        assert result.exit_code == 3
        assert "reading the embedding would break the memory budget: expected at most 1.0 MB" in result.stderr


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of few experts: with many tokens, what a layer computes is larger than its weights."""
    folder = tmp_path_factory.mktemp("deep") / "deep"
    model = SyntheticModel(num_hidden_layers=8, num_local_experts=4, num_experts_per_tok=2)
    synthesize(folder, model=model, dtype=torch.bfloat16, shard_size_bytes=None, seed=0)
    return folder


@pytest.fixture(scope="module")
def needed(large: Path) -> DeviceFootprint:
    """The needs of two layers of the large model."""
    spec = ModelSpec.from_folder(large)
    return DeviceFootprint(
        spec=spec,
        dtype=torch.bfloat16,
        inputs=build_inputs(InputRequest(seq_lens=(128, 128)), folder=large, spec=spec),
        backend=Backend.CPU,
        num_experts_at_once=find_target("builtin").num_experts_at_once(
            spec, dtype=torch.bfloat16, is_lazy=False
        ),
    )


@pytest.fixture(scope="module")
def allowed(needed: DeviceFootprint) -> int:
    """The bytes of a budget that lets the large model through."""
    return needed.loaded_layer_bytes + needed.activation_bytes + 10 * MB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all captures, each under the name of its run."""
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="module")
def measured(
    forked_python: Any,
    toy: Path,
    large: Path,
    deep: Path,
    needed: DeviceFootprint,
    allowed: int,
    folder: Path,
) -> dict[str, dict[str, Any]]:
    """Runs by name, one after the other in one process: the exit code, and what each took at the most."""

    def full(target: str, option: str, model: Path = large) -> list[str]:
        return ["full", "--model", str(model), "--seq-len", "8,5", "--target", TARGETS[target], option]

    def layers(span: str) -> list[str]:
        batch = ("--seq-len", "128", "--batch-size", "8")
        return ["multi-layer", "--model", str(deep), "--layers", span, *batch]

    def budgeted(model: Path) -> list[str]:
        lengths = ("--random-input", "--seq-len", "128,128")
        return ["multi-layer", "--model", str(model), "--layers", "0:2", *lengths]

    commands: dict[str, tuple[list[str], int | None]] = {
        # The first of each kind import what the others use.
        "import builtin": (full("builtin", "--prefetch", toy), None),
        "import reference": (full("reference", "--prefetch", toy), None),
        "builtin ahead": (full("builtin", "--prefetch"), None),
        "builtin": (full("builtin", "--no-prefetch"), None),
        "reference ahead": (full("reference", "--prefetch"), None),
        "converting ahead": (full("converting", "--prefetch"), None),
        "import layers": (layers("0:1"), None),
        "one": (layers("0:1"), None),
        "eight": (layers("0:8"), None),
        "import random": (budgeted(toy), None),
        "let through": (budgeted(large), allowed),
        "stopped": (budgeted(large), needed.loaded_layer_bytes + needed.activation_bytes // 2),
    }
    words = [
        ([*command, "--quiet", "--output-dir", str(folder / name)], budget)
        for name, (command, budget) in commands.items()
    ]
    done = forked_python(MEASURED.replace("sys.argv[1]", repr(json.dumps(words))))
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, json.loads(done.stdout), strict=True))


class TestMemory:
    """Measured in a process of its own, on layers of 100 MB."""

    def test_at_most_one_layer_is_held_with_and_without_reading_ahead(
        self, measured: dict[str, dict[str, Any]], large: Path
    ) -> None:
        layer = layer_bytes(ModelSpec.from_folder(large), torch.bfloat16)
        assert vocabulary_bytes(ModelSpec.from_folder(large), torch.bfloat16) > 0.5 * layer
        for name in ("builtin ahead", "builtin", "reference ahead"):
            assert measured[name]["exit_code"] == 0, measured[name]["stderr"]
            assert 0.9 * layer < measured[name]["taken"] < 1.25 * layer
        # A second layer would be seen: a port that converts holds it.
        assert measured["converting ahead"]["taken"] > 1.9 * layer

    def test_layers_that_were_written_are_held_no_more(
        self, measured: dict[str, dict[str, Any]], folder: Path
    ) -> None:
        one, eight = measured["one"], measured["eight"]
        sites_bytes = (folder / "one" / "layer_0.safetensors").stat().st_size
        assert sites_bytes > 8 * MB
        assert eight["exit_code"] == 0, eight["stderr"]
        # What the allocator keeps for itself differs by less than a few layers' sites.
        assert eight["taken"] < one["taken"] + 5 * sites_bytes

    def test_stays_within_a_budget_that_lets_the_run_through(
        self, measured: dict[str, dict[str, Any]], needed: DeviceFootprint, allowed: int
    ) -> None:
        let_through, stopped = measured["let through"], measured["stopped"]
        assert let_through["exit_code"] == 0, let_through["stderr"]
        assert needed.loaded_layer_bytes < let_through["taken"] <= allowed
        assert stopped["exit_code"] == 3
        assert "what layer 0 computes would break the memory budget" in stopped["stderr"]
