"""Ports of families that are not MiniMax-M2: mm2's own layers, and a user's that takes the hub's names."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.checkpoint.filling import unchanged
from minimax_tools.checkpoint.layer_tensors import LayerTensors, ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.toy_model import SyntheticModel
from mm2.golden_layer import open_golden
from neuron.cli import main as mm2_test
from neuron.ports.hub_names import hub_named
from neuron.ports.target import target_config

QWEN = Path(__file__).parents[1] / "ports" / "qwen3_moe.py"
GLM = Path(__file__).parents[1] / "ports" / "glm4_moe.py"
OTHERS = ("qwen3_moe", "olmoe")
WITH_DENSE_LAYERS = ("glm4_moe", "minimax_m3_vl")
ALL = (*OTHERS, *WITH_DENSE_LAYERS)
NUM_SITES = {**dict.fromkeys(OTHERS, 68), **dict.fromkeys(WITH_DENSE_LAYERS, 71)}
BRIEFLY = ("--decode", 1, "--max-new-tokens", 0, "--no-chunks")
GATE, UP = "mlp.experts.3.gate_proj.weight", "mlp.experts.3.up_proj.weight"

Make = Callable[[str], Path]


@pytest.fixture(scope="session")
def toy_of(make_model: Any) -> Make:
    """Gives the folder of a family's toy, in BF16."""
    return functools.cache(lambda family: make_model(SyntheticModel.toy(FAMILIES[family]), torch.bfloat16))


@pytest.fixture(scope="session")
def golden_of(toy_of: Make, make_golden: Any) -> Make:
    """Gives the golden of a family's toy: every layer, all sites."""
    pytest.importorskip("transformers", reason="goldens are made with transformers")
    return functools.cache(lambda family: make_golden(toy_of(family), "--seq-len", "48,33"))


@pytest.fixture
def judge(run: Any, toy_of: Make, golden_of: Make) -> Callable[..., dict[str, Any]]:
    """Runs a command of `mm2-test` on a family's toy and golden, on the CPU; gives its JSON."""

    def judge_port(command: str, family: str, target: str, *options: object) -> dict[str, Any]:
        given = ("--model", toy_of(family), "--golden", golden_of(family), "--target", target)
        result = run(command, *given, "--backend", "cpu", *options, "--json", "--quiet")
        assert result.stdout, result.stderr
        record: dict[str, Any] = json.loads(result.stdout)
        return record

    return judge_port


class TestHubNames:
    @pytest.fixture
    def reader(self, toy_of: Make) -> Any:
        with CheckpointReader(toy_of("qwen3_moe")) as reader:
            yield reader

    def test_tensors_have_the_names_of_the_checkpoint(self, reader: CheckpointReader) -> None:
        spec = ModelSpec.from_folder(reader.folder)
        named = hub_named(ModelTensors.open(reader, spec, torch.bfloat16), spec.family.stored_names)
        weight_map = json.loads((reader.folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert set(named) == set(weight_map)

    def test_mapping_is_read_popped_from_and_set_without_a_change_of_mm2s(
        self, reader: CheckpointReader
    ) -> None:
        spec = ModelSpec.from_folder(reader.folder)
        own = LayerTensors.open(reader, spec, 1, torch.bfloat16)
        named = hub_named(own, spec.family.stored_names)
        gate = own["block_sparse_moe.experts.3.w1.weight"]
        assert torch.equal(named[GATE], gate)
        out = torch.empty(2, gate.shape[1], dtype=gate.dtype)
        named.read_into(GATE, out, rows=range(3, 5))
        assert torch.equal(out, gate[3:5])
        assert (named.given_shape(GATE), named.given_dtype(GATE)) == (tuple(gate.shape), torch.bfloat16)
        copy, num_tensors = named.copy(), len(named)
        assert torch.equal(named.pop(GATE), gate)
        named[UP] = gate
        # A port may rename in place, also to a name that mm2 has for another tensor.
        named["block_sparse_moe.gate.weight"] = named.pop("mlp.gate.weight")
        assert (GATE in named, len(named)) == (False, num_tensors - 1)
        assert torch.equal(named[UP], gate)
        assert isinstance(unchanged(named, "block_sparse_moe.gate.weight").shape, tuple)
        assert torch.equal(copy[GATE], gate)
        assert not torch.equal(copy[UP], gate)
        assert len(own) == len(copy) == num_tensors

    def test_names_of_another_family_are_unknown(self, reader: CheckpointReader) -> None:
        spec = ModelSpec.from_folder(reader.folder)
        named = hub_named(LayerTensors.open(reader, spec, 0, torch.bfloat16), spec.family.stored_names)
        assert "block_sparse_moe.gate.weight" not in named
        with pytest.raises(KeyError, match="no tensor 'block_sparse_moe.gate.weight'"):
            _ = named["block_sparse_moe.gate.weight"]

    def test_minimax_m2_gets_the_mapping_itself(self, toy: Path) -> None:
        spec = ModelSpec.from_folder(toy)
        with CheckpointReader(toy) as reader:
            own = LayerTensors.open(reader, spec, 0, torch.bfloat16)
            assert hub_named(own, spec.family.stored_names) is own

    def test_golden_layer_gives_the_hubs_names(self, toy_of: Make, golden_of: Make) -> None:
        with open_golden(golden_of("qwen3_moe"), model=toy_of("qwen3_moe")) as golden:
            assert golden.layer(1).weights[GATE].shape == (128, 256)


def test_config_means_what_config_json_does(toy_of: Make) -> None:
    qwen, olmoe = (target_config(ModelSpec.from_folder(toy_of(family))) for family in OTHERS)
    assert (qwen.intermediate_size, qwen.moe_intermediate_size) == (6144, 128)
    assert (qwen.num_experts, qwen.num_local_experts, qwen.head_dim) == (32, 32, 64)
    assert (olmoe.intermediate_size, olmoe.num_experts, olmoe.head_dim) == (128, 32, 64)
    for config in (qwen, olmoe):
        assert not {"attn_type_list", "shared_intermediate_size", "scoring_func"} & vars(config).keys()


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("target", ["reference", "builtin"])
def test_own_layers_pass(judge: Any, family: str, target: str) -> None:
    record, num_sites = judge("sweep", family, target), NUM_SITES[family]
    assert (record["verdict"], record["compared"], record["of"]) == ("pass", num_sites, num_sites)
    assert not [note for note in record["notes"] if "not compared" in note]


@pytest.mark.parametrize("family", WITH_DENSE_LAYERS)
def test_layers_of_two_kinds_pass_in_a_chain(judge: Any, family: str) -> None:
    record = judge("full", family, "builtin")
    assert (record["verdict"], record["compared"]) == ("pass", NUM_SITES[family] + 3)


@pytest.mark.parametrize("family", ALL)
def test_own_layer_passes_on_ranks(
    family: str, toy_of: Make, golden_of: Make, forked_ranks: Any, tmp_path: Path
) -> None:
    given = ("sweep", "--model", toy_of(family), "--golden", golden_of(family), "--target", "builtin")
    done = forked_ranks(*given, "--backend", "cpu", "--tp-degree", 4, "--ep-degree", 2, "--json", num_ranks=4)
    record = json.loads(done.stdout)
    assert (record["verdict"], record["compared"]) == ("pass", NUM_SITES[family]), done.stderr


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("target", ["reference", "builtin"])
def test_own_layers_hold_the_weights(command: Any, toy_of: Make, family: str, target: str) -> None:
    result = command(mm2_test, "weights", "--model", toy_of(family), "--target", target)
    assert result.exit_code == 0, result.stdout + result.stderr
    assert "up_proj of expert 0" in result.stdout or "rows 128–255 up_proj" in result.stdout


class TestUsersPort:
    @pytest.mark.parametrize("name", ["Layer", "ByName"])
    def test_right_layer_passes(self, judge: Any, name: str) -> None:
        record = judge("sweep", "qwen3_moe", f"{QWEN}:{name}")
        missing = {"q_rope", "k_rope"} | ({"router_experts", "router_weights"} if name == "ByName" else set())
        assert (record["verdict"], record["compared"]) == ("pass", 68 - 4 * len(missing))

    def test_lost_shares_are_to_blame(self, judge: Any) -> None:
        record = judge("sweep", "qwen3_moe", f"{QWEN}:SharesLost")
        assert {site for blamed in record["blame"] for site in blamed["sites"]} == {"router_weights"}

    def test_right_weights_are_traced(self, command: Any, toy_of: Make) -> None:
        result = command(mm2_test, "weights", "--model", toy_of("qwen3_moe"), "--target", f"{QWEN}:Layer")
        assert result.exit_code == 0, result.stdout
        assert "experts 0–15: rows 0–127 gate_proj, rows 128–255 up_proj" in result.stdout

    def test_swapped_weights_are_named_as_on_the_hub(self, command: Any, toy_of: Make) -> None:
        result = command(
            mm2_test, "weights", "--model", toy_of("qwen3_moe"), "--target", f"{QWEN}:SwappedGateUp"
        )
        assert result.exit_code == 1
        assert "gate_proj and up_proj are swapped" in result.stdout

    def test_name_of_another_family_is_refused(self, command: Any, toy_of: Make) -> None:
        result = command(mm2_test, "weights", "--model", toy_of("qwen3_moe"), "--target", f"{QWEN}:NamesOfM2")
        assert result.exit_code == 3
        assert "there is no tensor 'block_sparse_moe.gate.weight'" in result.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["Model", "ModelAtOnce"])
    def test_right_model_passes(self, judge: Any, name: str) -> None:
        record = judge("model", "qwen3_moe", f"{QWEN}:{name}", *BRIEFLY)
        assert record["verdict"] == "pass"

    @pytest.mark.slow
    def test_wrong_layer_of_a_model_comes_first(self, judge: Any) -> None:
        record = judge("model", "qwen3_moe", f"{QWEN}:SwappedModel", *BRIEFLY)
        first = record["blame"][0]
        assert (record["verdict"], first["layer"], first["sites"]) == ("fail", 2, ["moe_delta"])

    @pytest.mark.slow
    def test_bisection_finds_the_wrong_layer(self, run: Any, toy_of: Make, golden_of: Make) -> None:
        given = ("--model", toy_of("qwen3_moe"), "--golden", golden_of("qwen3_moe"))
        for name, found in (("Layer", 0), ("SwappedGateUp", 1)):
            result = run("bisect", *given, "--target", f"{QWEN}:{name}", "--backend", "cpu")
            assert result.exit_code == found, result.stdout + result.stderr


@pytest.mark.parametrize("family", WITH_DENSE_LAYERS)
@pytest.mark.parametrize("target", ["reference", "builtin"])
def test_weights_of_each_kind_of_layer_are_traced(
    command: Any, toy_of: Make, family: str, target: str
) -> None:
    result = command(mm2_test, "weights", "--model", toy_of(family), "--target", target, "--json", "--quiet")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["verdict"]) == (0, "pass")
    dense, other = record["groups"]
    assert (dense["layers"], other["layers"]) == ([0], [1])
    kinds = set(dense["compared"]), set(other["compared"])
    assert {"gate_proj", "up_proj", "down_proj"} <= kinds[0]
    assert {"w1", "gate", "shared_experts.gate_proj", "shared_experts.down_proj"} <= kinds[1]
    own = {"glm4_moe": "k_proj.bias", "minimax_m3_vl": "index_k_norm"}[family]
    assert own in kinds[1]


class TestLayersOfTwoKinds:
    @pytest.mark.parametrize("name", ["Layer", "ByName"])
    def test_right_port_passes(self, judge: Any, name: str) -> None:
        record = judge("sweep", "glm4_moe", f"{GLM}:{name}")
        hidden = 4 * 2 + (3 * 2 if name == "ByName" else 0)
        assert (record["verdict"], record["compared"]) == ("pass", 71 - hidden)

    @pytest.mark.slow
    def test_port_is_traced_run_and_chained(
        self, command: Any, toy_of: Make, golden_of: Make, tmp_path: Path
    ) -> None:
        given = ("--model", toy_of("glm4_moe"), "--golden", golden_of("glm4_moe"), "--target", f"{GLM}:Layer")
        result = command(mm2_test, "port", *given, "--backend", "cpu", "--output-dir", tmp_path / "port")
        assert result.exit_code == 0, result.stdout
        assert "weights    right in layers 0-1" in result.stdout

    def test_right_model_passes(self, judge: Any) -> None:
        assert judge("model", "glm4_moe", f"{GLM}:Model", *BRIEFLY)["verdict"] == "pass"

    def test_swapped_mlps_are_to_blame_in_both_kinds(self, judge: Any) -> None:
        record = judge("sweep", "glm4_moe", f"{GLM}:SharedSwapped")
        blamed = {(blame["layer"], *blame["sites"]) for blame in record["blame"]}
        assert blamed == {(0, "mlp_delta"), *((layer, "shared_delta") for layer in (1, 2, 3))}

    def test_lost_bias_is_wrong_weights(self, judge: Any) -> None:
        (first, *_) = judge("sweep", "glm4_moe", f"{GLM}:BiasLost", "--layers", "0:1")["blame"]
        assert first["sites"] == ["k_proj"]
        assert first["is_of_weights"]

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            (
                "SharedSwapped",
                ("gate_proj and up_proj are", "shared_experts.gate_proj and shared_experts.up_proj are"),
            ),
            ("BiasesSwapped", ("k_proj.bias and v_proj.bias are swapped",) * 2),
            ("BiasLost", ("missing: k_proj.bias lands nowhere",) * 2),
        ],
    )
    def test_wrong_weights_are_named_in_both_kinds(
        self, command: Any, toy_of: Make, name: str, told: tuple[str, str]
    ) -> None:
        given = ("--model", toy_of("glm4_moe"), "--target", f"{GLM}:{name}", "--json", "--quiet")
        result = command(mm2_test, "weights", *given)
        record = json.loads(result.stdout)
        assert result.exit_code == 1
        for group, text in zip(record["groups"], told, strict=True):
            (wrong,) = (finding for finding in group["findings"] if finding["severity"] == "wrong")
            assert text in wrong["text"]
            assert group["explains_all"]
