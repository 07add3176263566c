"""Runs with one layer in memory: same values with and without reading ahead, nothing read twice, budgets kept."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
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
# Changes a model or a run's folder between two runs, and returns the model of the second.
Change = Callable[[Path, Path], Path]

# Of the wide model: so many tokens that the logits take 280 MB; what is left for all but them.
MANY, MANY_BUT_LOGITS = (200,), 200 * MB

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
def wide(make_model: Any) -> Path:
    """A small model with a vocabulary of 51 MB in BF16."""
    made: Path = make_model(SyntheticModel(num_hidden_layers=2, vocab_size=100_000), torch.bfloat16)
    return made


@pytest.fixture(scope="module")
def large(make_model: Any) -> Path:
    """Two layers of 107 MB in BF16, stored as FP8."""
    model = SyntheticModel(
        num_hidden_layers=2,
        hidden_size=1024,
        num_attention_heads=8,
        head_dim=128,
        num_local_experts=32,
        intermediate_size=512,
        vocab_size=30_000,
    )
    made: Path = make_model(model, torch.float8_e4m3fn)
    return made


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
        text = run(*common, "--prefetch").stderr
        lines = text.splitlines()
        told = [line for line in lines if line.startswith(("Reading", "Layer"))]
        words = [line.split(" (")[0].rstrip(".") for line in told]
        # The layers before the span make its input; no layer follows the last one of the run.
        ahead = [f"Reading layer {layer} ahead" for layer in range(3)]
        assert words == [*ahead[:2], "Layer 0", ahead[2], "Layer 1", "Layer 2"]
        # Where the CPU computes, nothing is prepared for another device.
        assert "Preparing" not in text
        assert "ahead" not in run(*common, "--no-prefetch").stderr

    @pytest.mark.slow
    def test_changes_no_bit_and_compiles_no_graph_on_xla(
        self, needs_xla: None, serve: Any, small: Path, tmp_path: Path
    ) -> None:
        layers = ("multi-layer", "--layers", "0:3", "--model", small, "--seq-len", "12,7", "--json")
        runs = [(target, option) for target in TARGETS for option in ("--prefetch", "--no-prefetch")]
        folders = [tmp_path / f"{target}{option}" for target, option in runs]
        commands = [
            (*layers, "--backend", "xla-cpu", "--target", TARGETS[target], option, "--output-dir", folder)
            for (target, option), folder in zip(runs, folders, strict=True)
        ]
        # Graphs are counted, not timed: the compiler need not try.
        results = serve(commands, XLA_FLAGS="--xla_backend_optimization_level=0")
        for (_, option), result in zip(runs, results, strict=True):
            counted = json.loads(result["stdout"])["graphs"]
            # The second run of a target finds what the first compiled.
            assert (counted["first_layer"] > 0) is (option == "--prefetch")
            assert (counted["later_layers"], counted["fallbacks"]) == (0, [])
        for prefetched, plain in zip(folders[::2], folders[1::2], strict=True):
            assert contents(prefetched) == contents(plain)

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


def test_progress_tells_each_layer_with_the_bytes_read_for_it(small: Path, tmp_path: Path) -> None:
    watcher = Watcher()
    with device_run(small, full_run(4, sites_level="layer"), progress=watcher) as (run, reader):
        run.capture(tmp_path / "run")
        embedding = reader.index[EMBEDDING].size_bytes
        stored = [stored_layer_bytes(reader.index, layer) for layer in range(4)]
    assert watcher.ran == [(0, stored[0] + embedding), *((layer, stored[layer]) for layer in (1, 2, 3))]


def test_progress_is_silent_where_asked(run: Any, small: Path) -> None:
    assert run("multi-layer", "--layers", "0:2", "--model", small, "--seq-len", 9, "--quiet").stderr == ""


def spoil_inputs(model: Path, directory: Path) -> Path:
    """Change the stored input of a run's first layer."""
    inputs = load_file(directory / "inputs.safetensors")
    inputs["hidden_states"][0, 0, 0] += 1
    save_file(inputs, directory / "inputs.safetensors")
    return model


def change_layer_0(model: Path, directory: Path) -> Path:
    """Copy the model with another norm in layer 0."""
    other = shutil.copytree(model, directory.parent / "other")
    norm = "model.layers.0.input_layernorm.weight"
    shard = TensorIndex.from_folder(other)[norm].file
    tensors = load_file(shard)
    tensors[norm] *= 2
    save_file(tensors, shard, metadata={"format": "pt"})
    return other


class TestResumption:
    """By the bytes that are read: a finished layer's are not among them."""

    @pytest.fixture
    def stumble(
        self, stumbling: str, write_port: Any, fail_at: Any, tmp_path: Path
    ) -> Callable[..., tuple[Watcher, int]]:
        """Runs until it fails at a layer, then goes on; what the second run told, and the bytes it read.

        Between the two a change may be made in the run's folder; it returns the model that goes on.
        """
        target = write_port(stumbling)

        def run_twice(folder: Path, run: Run, layer: int, change: Change | None) -> tuple[Watcher, int]:
            fail_at(layer)
            with device_run(folder, run, target=target) as (failing, _), pytest.raises(TargetError):
                failing.capture(tmp_path / "run")
            fail_at(-1)
            watcher = Watcher()
            folder = folder if change is None else change(folder, tmp_path / "run")
            with device_run(folder, run, target=target, progress=watcher) as (resumed, reader):
                resumed.capture(tmp_path / "run")
            return watcher, reader.num_bytes_read

        return run_twice

    @pytest.mark.parametrize(
        ("start", "failing", "change", "first_run"),
        [
            (None, 2, None, 2),
            (1, 3, None, 3),
            # Nothing of the span itself is stored.
            (2, 2, None, 0),
            # The first layer was not fed the input that is stored.
            (1, 3, spoil_inputs, 0),
            # Another layer before the span made it.
            (1, 3, change_layer_0, 0),
        ],
    )
    def test_goes_on_with_the_layer_that_failed(
        self,
        stumble: Any,
        small: Path,
        start: int | None,
        failing: int,
        change: Change | None,
        first_run: int,
    ) -> None:
        """A run of the whole model, or from layer `start` on; it goes on with layer `first_run`."""
        whole = full_run(4, sites_level="layer")
        run = whole if start is None else multi_layer_run(Span(start, 4), sites_level="layer")
        watcher, num_bytes = stumble(small, run, failing, change)
        ran = list(range(first_run, 4))
        assert (watcher.skipped, [layer for layer, _ in watcher.ran]) == (list(range(first_run)), ran)
        if first_run == 0:
            return
        with CheckpointReader(small) as reader:
            layers = sum(stored_layer_bytes(reader.index, layer) for layer in ran)
            head = sum(reader.index[name].size_bytes for name in (FINAL_NORM, LM_HEAD))
        # The layers before a span, which made its input, are looked at too.
        outside = head if start is None else fingerprint_bytes(small, Span(0, start))
        assert num_bytes == fingerprint_bytes(small, Span(start or 0, 4)) + layers + outside

    def test_head_that_failed_is_all_that_is_left(self, wide: Path, tmp_path: Path) -> None:
        run, directory = full_run(2, sites_level="layer"), tmp_path / "run"
        with pytest.raises(MemoryBudgetError, match="the lm_head and its logits would break"):
            run_within(MANY_BUT_LOGITS, wide, directory, run, lengths=MANY)
        assert len([*directory.glob("layer_*.safetensors")]) == 2
        watcher = Watcher()
        with device_run(wide, run, lengths=MANY, progress=watcher) as (resumed, reader):
            resumed.capture(directory)
            head = sum(reader.index[name].size_bytes for name in (FINAL_NORM, LM_HEAD))
            assert reader.num_bytes_read == fingerprint_bytes(wide, Span(0, 2)) + head
        assert (watcher.skipped, watcher.ran) == ([0, 1], [])
        with device_run(wide, run, lengths=MANY) as (whole, _):
            whole.capture(tmp_path / "whole")
        assert contents(directory) == contents(tmp_path / "whole")


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


Commands = dict[str, tuple[list[str], int | None]]
Measured = dict[str, dict[str, Any]]


@pytest.fixture
def measure(forked_python: Any, tmp_path: Path) -> Callable[[Commands], Measured]:
    """Runs commands by name, one after the other in one process: the exit code, and what each took at the most."""

    def run(commands: Commands) -> Measured:
        words = [
            ([*command, "--quiet", "--output-dir", str(tmp_path / name)], budget)
            for name, (command, budget) in commands.items()
        ]
        done = forked_python(MEASURED.replace("sys.argv[1]", repr(json.dumps(words))))
        assert done.returncode == 0, done.stderr
        return dict(zip(commands, json.loads(done.stdout), strict=True))

    return run


class TestMemory:
    """Measured in a process of its own, on layers of 100 MB. The first run of each imports what the others use."""

    @pytest.mark.parametrize(
        ("option", "target", "least", "most"),
        [
            ("--prefetch", "builtin", 0.9, 1.25),
            pytest.param("--no-prefetch", "builtin", 0.9, 1.25, marks=pytest.mark.slow),
            pytest.param("--prefetch", "reference", 0.9, 1.25, marks=pytest.mark.slow),
            # A second layer would be seen: a port that converts holds it.
            ("--prefetch", "converting", 1.9, 10.0),
        ],
    )
    def test_at_most_one_layer_is_held_with_and_without_reading_ahead(
        self, measure: Any, toy: Path, large: Path, option: str, target: str, least: float, most: float
    ) -> None:
        layer = layer_bytes(ModelSpec.from_folder(large), torch.bfloat16)
        assert vocabulary_bytes(ModelSpec.from_folder(large), torch.bfloat16) > 0.5 * layer
        words = ["full", "--seq-len", "8,5", "--target", TARGETS[target], option, "--model"]
        run = measure({"imports": ([*words, str(toy)], None), target + option: ([*words, str(large)], None)})
        assert run[target + option]["exit_code"] == 0, run[target + option]["stderr"]
        assert least * layer < run[target + option]["taken"] < most * layer

    @pytest.mark.slow
    def test_layers_that_were_written_are_held_no_more(self, measure: Any, tmp_path: Path) -> None:
        # Few experts: with many tokens, what a layer computes is larger than its weights.
        model = SyntheticModel(num_hidden_layers=8, num_local_experts=4, num_experts_per_tok=2)
        deep = tmp_path / "deep"
        synthesize(deep, model=model, dtype=torch.bfloat16, shard_size_bytes=None, seed=0)
        words = ["multi-layer", "--model", str(deep), "--seq-len", "128", "--batch-size", "8", "--layers"]
        spans = {"imports": "0:1", "one": "0:1", "eight": "0:8"}
        run = measure({name: ([*words, span], None) for name, span in spans.items()})
        sites_bytes = (tmp_path / "one" / "layer_0.safetensors").stat().st_size
        assert sites_bytes > 8 * MB
        assert run["eight"]["exit_code"] == 0, run["eight"]["stderr"]
        # What the allocator keeps for itself differs by less than a few layers' sites.
        assert run["eight"]["taken"] < run["one"]["taken"] + 5 * sites_bytes

    @pytest.mark.slow
    def test_stays_within_a_budget_that_lets_the_run_through(
        self, measure: Any, toy: Path, large: Path
    ) -> None:
        spec, target = ModelSpec.from_folder(large), find_target("builtin")
        num_experts = target.num_experts_at_once(spec, dtype=torch.bfloat16, is_lazy=False)
        inputs = build_inputs(InputRequest(seq_lens=(128, 128)), folder=large, spec=spec)
        needed = replace(footprint(large, length=128), inputs=inputs, num_experts_at_once=num_experts)
        allowed = needed.loaded_layer_bytes + needed.activation_bytes + 10 * MB
        too_few = needed.loaded_layer_bytes + needed.activation_bytes // 2
        words = ["multi-layer", "--layers", "0:2", "--random-input", "--seq-len", "128,128", "--model"]
        run = measure(
            {
                "imports": ([*words, str(toy)], None),
                "let through": ([*words, str(large)], allowed),
                "stopped": ([*words, str(large)], too_few),
            }
        )
        assert run["let through"]["exit_code"] == 0, run["let through"]["stderr"]
        assert needed.loaded_layer_bytes < run["let through"]["taken"] <= allowed
        assert run["stopped"]["exit_code"] == 3
        assert "what layer 0 computes would break the memory budget" in run["stopped"]["stderr"]
