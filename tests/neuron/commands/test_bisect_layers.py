"""`mm2-test bisect` on ports that are wrong in layers that are known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.provenance import numeric_environment
from minimax_tools.synthetic.toy_model import SyntheticModel

NUM_LAYERS = 12
# ⌈log2 12⌉ + 1
MOST_RUNS = 5
# Scales an output: BF16 rounds it, so that some of its values move.
FAINT = 1.02

# A matrix was never loaded, in some layers; one module serves all.
UNLOADED = """
from neuron.builtin.layer import DeviceLayer

class Port(DeviceLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx in {layers}:
            tensors["{name}"] = torch.zeros_like(tensors["{name}"])
        return super().convert_state_dict(tensors, config, layer_idx)
"""
# Gate and up swapped in layer 7, seen from outside; a module for each layer.
BLACK_BOX = """
class Port(ReferenceLayer):
    sites = {}

    def convert_state_dict(self, tensors, config, layer_idx):
        swapped = {"w1.weight": "w3.weight", "w3.weight": "w1.weight"} if layer_idx == 7 else {}
        return {name[:-9] + swapped.get(name[-9:], name[-9:]): tensors[name] for name in tensors}
"""
# Layer 5 is wrong where it runs right behind layer 4 and there alone: what it is handed is not copied.
WRONG_IN_A_CHAIN = """
from neuron.builtin.layer import DeviceLayer

class Port(DeviceLayer):
    last = []
    layer_idx = None

    def convert_state_dict(self, tensors, config, layer_idx):
        Port.layer_idx = layer_idx
        return super().convert_state_dict(tensors, config, layer_idx)

    def forward(self, hidden_states, attention_mask, position_ids):
        is_behind = any(torch.equal(last, hidden_states) for last in Port.last)
        output, _ = super().forward(hidden_states, attention_mask, position_ids)
        Port.last = [*Port.last, output.clone()][-2:]  # a layer is called twice
        return output * {factor} if is_behind and Port.layer_idx == 5 else output
"""
# Fails at the layer that a variable names: the source stays the same.
STUMBLING = """
from neuron.builtin.layer import DeviceLayer

class Port(DeviceLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        if os.environ.get("FAIL_AT") == str(layer_idx):
            raise RuntimeError("out of luck")
        if os.environ.get("DIE_AT") == str(layer_idx):
            os.kill(os.getpid(), 9)
        with open(os.environ["RAN"], "a") as file:
            file.write(f"{layer_idx} ")
        state = super().convert_state_dict(tensors, config, layer_idx)
        if layer_idx == 10:
            state["self_attn.o_proj.weight"] = torch.zeros_like(tensors["self_attn.o_proj.weight"])
        return state
"""


@pytest.fixture(scope="module")
def deep(make_model: Any) -> Path:
    """A narrow FP8 model of twelve layers."""
    model = SyntheticModel(
        num_hidden_layers=NUM_LAYERS,
        hidden_size=128,
        num_attention_heads=4,
        head_dim=32,
        rotary_dim=16,
        num_local_experts=16,
        intermediate_size=64,
    )
    made: Path = make_model(model, torch.float8_e4m3fn)
    return made


@pytest.fixture(scope="module")
def deep_golden(deep: Path, make_golden: Any) -> Path:
    """The deep model's golden: inputs, outputs and their floor."""
    golden: Path = make_golden(deep, "--seq-len", "48,33", "--sites", "layer")
    return golden


@pytest.fixture
def bisect(run: Any, deep: Path, deep_golden: Path) -> Any:
    """Runs `mm2-test bisect` over the twelve layers."""

    def run_bisect(target: str, *arguments: object) -> Any:
        common = ("--model", deep, "--golden", deep_golden, "--backend", "cpu")
        return run("bisect", *common, "--target", target, *arguments)

    return run_bisect


def unloaded(*layers: int, name: str = "self_attn.o_proj.weight") -> str:
    return UNLOADED.format(layers=layers, name=name)


def chains_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [chain for probe in record["probes"] for chain in probe["chains"]]


def layers_blamed(record: dict[str, Any]) -> list[int]:
    return [blame["layer"] for blame in record["blame"]]


def test_wrong_layer_is_found_and_both_sides_of_the_cut_were_run(bisect: Any, write_port: Any) -> None:
    result = bisect(write_port(unloaded(7)), "--json", "--quiet")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert record["verdict"] == "fail"
    assert layers_blamed(record) == [7]
    assert record["blame"][0]["sites"] == ["output"]
    assert record["runs"] == len(record["probes"]) <= MOST_RUNS
    chains = chains_of(record)
    spans = [(one["start_layer"], one["end_layer"]) for one in chains if one["verdict"] == "pass"]
    assert set(range(7)) <= {number for start, end in spans for number in range(start, end + 1)}
    assert (chains[-1]["start_layer"], chains[-1]["end_layer"]) == (7, 7)
    assert chains[-1]["verdict"] == "fail"


def test_black_box_that_is_built_layer_by_layer_is_found_out(bisect: Any, write_port: Any) -> None:
    result = bisect(write_port(BLACK_BOX))
    assert result.exit_code == 1
    assert result.stdout.startswith("FAIL: layer 7, output\n")
    assert "layers 0-6 are right, as far as chains see" in " ".join(result.stdout.split())
    assert re.search(r"mm2-test single-layer --layer 7 --model .* --golden .* --sites all", result.stdout)
    assert "Probe 1: layers 0 to 5." in result.stderr
    assert re.search(r"Layer 3 \(4 of 6\): ", result.stderr)


def test_right_port_passes_and_is_told_what_could_not_be_seen(bisect: Any, tmp_path: Path) -> None:
    result = bisect("builtin", "--json", "--quiet")
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert (record["verdict"], record["blame"], record["drifts"]) == ("pass", [], [])
    assert record["runs"] <= MOST_RUNS
    assert record["compared"] < record["of"] == NUM_LAYERS
    visible = record["smallest_visible"]
    assert 0.001 < visible["alone"] < visible["in_chains"] < 0.05
    text = bisect("builtin", "--quiet").stdout
    assert re.search(
        r"At the end of a chain, noise of [12]\.\d+ % or more on\s+every\s+token\s+is\s+seen", text
    )
    assert "mm2-test sweep --layers 0:12" in text
    # Nothing is kept of the layers' outputs.
    directory = Path(record["directory"])
    assert [path.name for path in directory.iterdir()] == ["bisection.json"]
    assert directory == tmp_path / "captures" / "neuron" / "bisect_0_to_11"


def test_golden_of_all_sites_tells_what_a_sweep_would_see(run: Any, on_small: tuple[object, ...]) -> None:
    result = run("bisect", *on_small, "--backend", "cpu", "--json", "--quiet")
    assert result.exit_code == 0
    visible = json.loads(result.stdout)["smallest_visible"]
    assert visible["in_a_sweep"] < visible["alone"] < visible["in_chains"]


def test_all_culprits_are_found_when_asked_for(bisect: Any, write_port: Any) -> None:
    target = write_port(unloaded(2, 3, 9))
    first = json.loads(bisect(target, "--json", "--quiet").stdout)
    assert layers_blamed(first) == [2]
    every = json.loads(bisect(target, "--all", "--json", "--quiet").stdout)
    assert layers_blamed(every) == [2, 3, 9]
    assert every["runs_resumed"] == first["runs"]
    part = json.loads(bisect(target, "--all", "--start-layer", 3, "--end-layer", 8, "--json").stdout)
    assert layers_blamed(part) == [3]


def test_mistake_of_few_tokens_hides_in_chains_and_not_in_layers_alone(bisect: Any, write_port: Any) -> None:
    # One of sixteen experts adds nothing: no more than a few tokens are wrong.
    target = write_port(unloaded(5, name="block_sparse_moe.experts.3.w2.weight"))
    chained = bisect(target, "--chain-length", 4, "--json", "--quiet")
    assert chained.exit_code == 0
    notes = " ".join(json.loads(chained.stdout)["notes"])
    assert "or one of few tokens, may hide" in notes
    assert "choose a shorter --chain-length" in notes
    alone = bisect(target, "--exhaustive", "--json", "--quiet")
    assert alone.exit_code == 1
    record = json.loads(alone.stdout)
    assert layers_blamed(record) == [5]
    assert record["runs"] == record["compared"] == record["of"] == NUM_LAYERS
    assert record["smallest_visible"]["in_chains"] is None
    assert "chains" not in record["blame"][0]["reason"]


@pytest.mark.parametrize(
    ("factor", "exit_code", "verdict"), [(1.5, 1, "fail"), (FAINT, 0, "warn")], ids=["loud", "faint"]
)
def test_layers_that_are_wrong_in_a_chain_alone_are_no_culprits(
    bisect: Any, write_port: Any, factor: float, exit_code: int, verdict: str
) -> None:
    target = write_port(WRONG_IN_A_CHAIN.format(factor=factor))
    result = bisect(target, "--json", "--quiet")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["verdict"], record["blame"]) == (exit_code, verdict, [])
    [drift] = record["drifts"]
    assert (drift["start_layer"], drift["end_layer"]) == (4, 5)
    assert "each of the layers, run alone, is right" in drift["reason"]
    words = {"fail": "FAIL: layers 4-5, in a chain alone\n", "warn": "WARN"}
    assert bisect(target, "--quiet").stdout.startswith(words[verdict])


def test_interrupted_bisection_goes_on_where_it_stopped(
    bisect: Any, write_port: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, ran = write_port(STUMBLING), tmp_path / "ran"
    monkeypatch.setenv("RAN", str(ran))
    monkeypatch.setenv("FAIL_AT", "10")
    failed = bisect(target)
    assert failed.exit_code == 3
    assert "out of luck" in failed.stderr
    assert ran.read_text().split() == ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
    monkeypatch.delenv("FAIL_AT")
    ran.unlink()
    resumed = bisect(target, "--json")
    assert "Probe 1: layers 0 to 5: done before." in resumed.stderr
    assert "Probe 2: layers 6 to 8: done before." in resumed.stderr
    record = json.loads(resumed.stdout)
    assert (resumed.exit_code, layers_blamed(record), record["runs_resumed"]) == (1, [10], 3)
    assert ran.read_text().split() == ["10"]
    whole = json.loads(bisect(target, "--json", "--anew").stdout)
    assert whole["runs_resumed"] == 0
    assert whole["probes"] == record["probes"]


@pytest.mark.slow
def test_killed_bisection_goes_on_where_it_stopped(
    forked: Any,
    bisect: Any,
    write_port: Any,
    monkeypatch: pytest.MonkeyPatch,
    deep: Path,
    deep_golden: Path,
    tmp_path: Path,
) -> None:
    ran, target = tmp_path / "ran", write_port(STUMBLING)
    # What earlier tests left in this process must not tell it from the one that is killed.
    for name in numeric_environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAN", str(ran))
    sides = ("--model", deep, "--golden", deep_golden, "--backend", "cpu", "--target", target)
    killed = forked("bisect", *sides, "--captures", tmp_path / "captures", DIE_AT="8")
    assert killed.returncode == 3
    assert "ended by SIGKILL" in killed.stderr
    assert "while converting the weights of" in killed.stderr
    ran.unlink()
    resumed = bisect(target, "--json")
    record = json.loads(resumed.stdout)
    assert (resumed.exit_code, layers_blamed(record), record["runs_resumed"]) == (1, [10], 1)
    assert ran.read_text().split() == ["6", "7", "8", "9", "10"]


def test_other_files_in_the_directory_are_left_alone(bisect: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    result = bisect("builtin", "--output-dir", tmp_path / "mine")
    assert result.exit_code == 3
    assert "holds something other than a bisection: found thesis.txt" in result.stderr
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"


def test_golden_that_lacks_layers_is_refused(run: Any, deep: Path, make_golden: Any) -> None:
    part = ("--layers", "0:6", "--seq-len", "12", "--sites", "layer")
    golden = make_golden(deep, *part, command="multi-layer")
    result = run("bisect", "--model", deep, "--golden", golden, "--backend", "cpu")
    assert result.exit_code == 3
    assert "lacks layer 6, layer 7, layer 8, layer 9 and 2 more" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layers", "4:13"), "layer 12 is out of range"),
        (("--chain-length", 9), "9 is not in the range 1<=x<=8"),
    ],
)
def test_wrong_usage_is_refused(bisect: Any, arguments: tuple[object, ...], words: str) -> None:
    result = bisect("builtin", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.slow
def test_graphs_are_compiled_for_the_first_layer_alone(
    needs_xla: None, serve: Any, write_port: Any, deep: Path, deep_golden: Path, tmp_path: Path
) -> None:
    target = write_port(unloaded(7))
    common = ("--model", deep, "--golden", deep_golden, "--backend", "xla-cpu", "--captures", tmp_path)
    [result] = serve([("bisect", *common, "--target", target, "--json")])
    record = json.loads(result["stdout"])
    assert (result["exit_code"], layers_blamed(record)) == (1, [7])
    assert record["graphs"]["first_layer"] > 0
    assert record["graphs"]["later_layers"] == 0
    assert record["graphs"]["fallbacks"] == []


@pytest.mark.slow
def test_ranks_share_the_layers_of_a_bisection(
    process: Any, write_port: Any, deep: Path, deep_golden: Path, tmp_path: Path
) -> None:
    common = ("--model", deep, "--golden", deep_golden, "--backend", "cpu", "--captures", tmp_path)
    target = write_port(unloaded(7))
    done = process("bisect", *common, "--target", target, "--tp-degree", 2, "--json", "--quiet")
    assert done.returncode == 1, done.stderr
    record = json.loads(done.stdout)
    assert layers_blamed(record) == [7]
    assert "--tp-degree 2 --ep-degree 1" in record["next"][0]
