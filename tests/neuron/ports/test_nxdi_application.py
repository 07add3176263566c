"""The conversion of a port's own application: run, cast and sharded as NxDI does, and judged.

NxDI is a stand-in here, `tests/stand_ins/nxdi`; `test_nxdi` runs the real one where it is installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
STAND_IN = REPOSITORY / "tests" / "stand_ins" / "nxdi"
PORT = REPOSITORY / "tests" / "ports" / "causal_port.py"
ENVIRONMENT = {"PYTHONPATH": f"{STAND_IN}:{REPOSITORY}", "NXD_CPU_MODE": "1"}

FAILING = ("Failing", "Misfit", "NoApplication")
SWEPT = ("ByItself", "NotNormalised", "AveragedNorms", *FAILING)
# These are traced by mm2-test weights too.
TRACED = ("DecoderLayer", "AsDeclared", "ByTable", "SwappedGateUp", "LostBias", "LostOutput")
SEVERAL = f"""
import sys
sys.path.insert(0, {str(PORT.parent)!r})
from causal_port import Config, DecoderLayer, ForCausalLM, Model
from neuronx_distributed_inference.models.model_base import NeuronBaseModel

class Other(DecoderLayer):
    def __init__(self, config: Config, layer_idx):
        super().__init__(config, layer_idx)

class Third(Other):
    pass

class OtherModel(NeuronBaseModel):
    def init_model(self, config):
        self.layers = [Other(config, layer) for layer in range(1)]

class FirstForCausalLM(ForCausalLM):
    pass

class OtherForCausalLM(ForCausalLM):
    _model_cls = OtherModel

class Unused:
    pass

def Made(config: Config, layer_idx):
    return Other(config, layer_idx)
"""


@pytest.fixture(scope="module")
def results(
    serve: Callable[..., list[dict[str, Any]]], on_small: Any, small_fp8: Path, tmp_path_factory: Any
) -> dict[str, dict[str, Any]]:
    """Exit code, stdout and stderr of each command, by command and target."""
    folder = tmp_path_factory.mktemp("application")
    (folder / "several.py").write_text(SEVERAL)
    commands: dict[str, tuple[object, ...]] = {}

    def judge(name: str, target: str, *command: object) -> None:
        captures = ("--backend", "cpu", "--captures", folder / name.replace(" ", "_"), "--json")
        commands[name] = (*command, *on_small, "--target", target, *captures)

    for name in (*SWEPT, *TRACED):
        judge(f"sweep {name}", f"nxdi:{PORT}:{name}", "sweep", "--layers", "1:2")
    for name in ("Other", "Third", "Made"):
        judge(f"sweep {name}", f"nxdi:{folder}/several.py:{name}", "sweep", "--layers", "1:2")
    for name in ("AsDeclared", "SwappedGateUp"):
        experts = ("component", "--layer", 1, "--component", "experts")
        judge(f"experts {name}", f"nxdi:{PORT}:{name}", *experts)
    for name in TRACED:
        target = ("--model", small_fp8, "--layer", 1, "--target", f"nxdi:{PORT}:{name}")
        commands[f"weights {name}"] = ("weights", *target)
    as_declared = ("--backend", "cpu", "--target", f"nxdi:{PORT}:AsDeclared")
    trace = ("trace", "--layer", 1, *on_small, "--output", folder / "layer_1.pt2")
    commands["trace AsDeclared"] = (*trace, *as_declared)
    judge("sweep traced", f"traced:{folder}/layer_1.pt2", "single-layer", "--layer", 1)
    done = serve(list(commands.values()), **ENVIRONMENT)
    return dict(zip(commands, done, strict=True))


BASE, CONVERSION = "NeuronBaseForCausalLM", "convert_hf_to_neuron_state_dict"
CONVERTED = f"{CONVERSION}, then NxDI's cast and NxD's sharding"
WAY_OUT = "mm2_causal_lm = None"
ROUNDED = ("gate (router) is bfloat16: the router decides in float32", "e_score_correction_bias is bfloat16")


def record_of(result: dict[str, Any]) -> dict[str, Any]:
    assert result["exit_code"] in (0, 1), result["stderr"]
    record: dict[str, Any] = json.loads(result["stdout"])
    return record


def blamed(result: dict[str, Any]) -> set[str]:
    return {site for blame in record_of(result)["blame"] for site in blame["sites"]}


def conversion(result: dict[str, Any]) -> str:
    text: str = record_of(result)["description"]["provenance"]["options"]["conversion"]
    return text


class TestSweep:
    def test_router_that_nxdi_casts_to_bf16_fails_and_is_named(self, results: dict[str, Any]) -> None:
        record = record_of(results["sweep DecoderLayer"])
        assert (record["verdict"], blamed(results["sweep DecoderLayer"])) == ("fail", {"router_experts"})
        assert record["observed_dtypes"] == {"router_gate": "bfloat16", "correction_bias": "bfloat16"}
        assert any("the port holds router_gate in bfloat16" in note for note in record["notes"])

    def test_dtypes_as_declared_pass_and_weights_of_chosen_experts_are_derived(
        self, results: dict[str, Any]
    ) -> None:
        result = results["sweep AsDeclared"]
        record = record_of(result)
        # Rotated queries and keys are not shown.
        assert (record["verdict"], record["compared"], record["of"]) == ("pass", 15, 17)
        assert {"pass"} == {one["status"] for one in record["sites"] if one["site"] == "router_weights"}
        assert "gives nothing" not in result["stderr"]
        assert "prints while it converts" not in result["stdout"]

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("DecoderLayer", f"ForCausalLM.{CONVERTED}"),
            ("SwappedGateUp", f"SwappingForCausalLM.{CONVERTED}"),
            ("ByTable", "mm2's table of NxDI's names, not the port: mm2_causal_lm = None"),
            ("ByItself", "ByItself.convert_state_dict"),
            # Of several applications it is the one that builds the layer or its base.
            ("Other", f"OtherForCausalLM.{CONVERTED}"),
            ("Third", f"OtherForCausalLM.{CONVERTED}"),
        ],
    )
    def test_report_says_whose_conversion_it_was(
        self, results: dict[str, Any], name: str, words: str
    ) -> None:
        assert conversion(results[f"sweep {name}"]) == words

    def test_layer_filled_otherwise_passes_and_a_table_alone_is_warned_of(
        self, results: dict[str, Any]
    ) -> None:
        records = [record_of(results[f"sweep {name}"]) for name in ("DecoderLayer", "ByItself", "ByTable")]
        assert [record["verdict"] for record in records] == ["fail", "pass", "pass"]
        notes = [[note for note in record["notes"] if "mm2's table" in note] for record in records]
        assert [len(found) for found in notes] == [0, 0, 1]
        assert "a mistake in the port's own conversion does not show" in notes[2][0]

    @pytest.mark.parametrize(
        ("run", "sites", "lost"),
        [
            ("sweep SwappedGateUp", {"moe_delta"}, ""),
            ("experts SwappedGateUp", {"moe_delta"}, ""),
            ("sweep LostBias", {"router_experts"}, "router.e_score_correction_bias"),
            ("sweep LostOutput", {"attn_delta"}, "o_proj.o_proj.weight"),
            ("sweep NotNormalised", {"router_weights"}, ""),
            # The norm of each head is shown.
            ("sweep AveragedNorms", {"q_norm", "k_norm"}, ""),
        ],
    )
    def test_mistake_is_blamed_and_weights_that_no_tensor_fills_are_told(
        self, results: dict[str, Any], run: str, sites: set[str], lost: str
    ) -> None:
        assert blamed(results[run]) == sites
        stderr = results[run]["stderr"]
        assert ("The port's conversion gives nothing for" in stderr) is bool(lost)
        assert lost in stderr

    @pytest.mark.parametrize(
        ("name", "texts"),
        [
            ("Failing", (f"FailingForCausalLM.{CONVERSION} failed", "KeyError: 'layers.7.nothing'", WAY_OUT)),
            (
                "Misfit",
                (
                    f"UntransposingForCausalLM.{CONVERSION} gives weights",
                    "down_proj.weight (expected [8, 32, 64], found [8, 64, 32])",
                    WAY_OUT,
                ),
            ),
            # A function, among several applications.
            (
                "Made",
                (
                    f"several subclasses of {BASE}",
                    "FirstForCausalLM, OtherForCausalLM",
                    "mm2_causal_lm = CLASS",
                ),
            ),
            ("NoApplication", ("NoApplication.mm2_causal_lm is no application of NxDI",)),
        ],
    )
    def test_conversion_that_cannot_serve_is_named_with_the_way_out(
        self, results: dict[str, Any], name: str, texts: tuple[str, ...]
    ) -> None:
        result = results[f"sweep {name}"]
        assert result["exit_code"] == 3
        assert [text for text in texts if text not in result["stderr"]] == []


def test_experts_run_alone_from_the_golden_choice(results: dict[str, Any]) -> None:
    right = record_of(results["experts AsDeclared"])
    assert (right["verdict"], right["compared"]) == ("pass", 1)


def test_layer_is_compiled_and_passes(results: dict[str, Any]) -> None:
    assert results["trace AsDeclared"]["exit_code"] == 0, results["trace AsDeclared"]["stderr"]
    assert "router_weights" in results["trace AsDeclared"]["stdout"]
    record = record_of(results["sweep traced"])
    assert (record["verdict"], record["compared"]) == ("pass", 15)


@pytest.mark.parametrize(
    ("name", "exit_code", "texts"),
    [
        ("AsDeclared", 0, (f"Converted by ForCausalLM.{CONVERSION}",)),
        ("ByTable", 0, ("Converted by mm2's table of NxDI's names, not the port",)),
        ("DecoderLayer", 1, ROUNDED),
        ("SwappedGateUp", 1, ("w1 (gate) and w3 (up) are swapped",)),
        ("LostBias", 1, ("missing: e_score_correction_bias lands nowhere",)),
        ("LostOutput", 1, ("missing: o_proj lands nowhere",)),
    ],
)
def test_weights_are_traced_through_the_applications_conversion(
    results: dict[str, Any], name: str, exit_code: int, texts: tuple[str, ...]
) -> None:
    result = results[f"weights {name}"]
    assert result["exit_code"] == exit_code, result["stdout"]
    assert [text for text in texts if text not in result["stdout"]] == []
