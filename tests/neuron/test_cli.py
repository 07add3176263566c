"""Runs from the command line, each on the CPU, right and wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compare.cli import main as mm2_compare
from neuron.cli import main as mm2_test

LAYER_0 = ("single-layer", "--layer", 0)
COMPONENTS = ("attention", "router", "experts", "moe", "input_norm", "post_norm")
PRESETS: dict[str, tuple[object, ...]] = {
    "single_layer_2": ("single-layer", "--layer", 2),
    "layers_1_to_3": ("multi-layer", "--start-layer", 1, "--end-layer", 3),
    "layers_0_to_1": ("multi-layer", "--layers", "0:2"),
    "sweep_0_to_3": ("sweep",),
    "full_model": ("full",),
    **{
        f"component_1_{component}": ("component", "--layer", 1, "--component", component)
        for component in COMPONENTS
    },
}

# Scaled after o_proj: nothing before it is wrong, all after it is.
WRONG_ATTENTION = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx
        self.self_attn.register_forward_hook(self.spoil)

    def spoil(self, module, args, output):
        return output * 1.5 if self.layer_idx == 1 else output
"""

# One of each kind, and all components of the device layer.
EVERY_RUN = [(name, target) for name in PRESETS for target in ("builtin", "reference")]
FAST_RUNS = {
    *((name, "builtin") for name in PRESETS if name not in ("layers_0_to_1", "single_layer_2")),
    ("single_layer_2", "reference"),
    ("component_1_moe", "reference"),
}


@pytest.fixture
def judge(run: Any, on_small: tuple[object, ...]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs a preset on the small model and its golden: the exit code, and the JSON."""

    def judge_run(*words: object) -> tuple[int, dict[str, Any]]:
        result = run(*words, *on_small, "--json")
        return result.exit_code, json.loads(result.stdout)

    return judge_run


@pytest.fixture
def record_of(run: Any, small_fp8: Path) -> Callable[..., dict[str, Any]]:
    """Runs the small model without a golden: the JSON."""

    def record(*words: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run(*words, "--model", small_fp8, "--json").stdout)
        return found

    return record


@pytest.mark.parametrize(
    ("name", "target"),
    [pytest.param(*run, marks=() if run in FAST_RUNS else pytest.mark.slow) for run in EVERY_RUN],
)
def test_clean_target_passes_every_preset(judge: Any, tmp_path: Path, name: str, target: str) -> None:
    exit_code, record = judge(*PRESETS[name], "--target", target)
    assert (exit_code, record["verdict"], record["blame"]) == (0, "pass", [])
    assert record["compared"] == record["of"] > 0
    assert record["directory"] == str(tmp_path / "captures" / "neuron" / name)
    # The CPU is the default where nothing else is.
    assert record["description"]["provenance"]["backend"] == "cpu"


@pytest.mark.parametrize(
    ("preset", "blame"),
    [
        # TestSummary runs it fast.
        pytest.param("sweep_0_to_3", [(1, ["attn_delta"])], marks=pytest.mark.slow),
        ("full_model", [(1, ["attn_delta"])]),
        pytest.param("layers_1_to_3", [(1, ["attn_delta"])], marks=pytest.mark.slow),
        ("component_1_attention", [(1, ["attn_delta"])]),
        ("single_layer_2", []),
        ("component_1_moe", []),
        pytest.param("component_1_post_norm", [], marks=pytest.mark.slow),
        pytest.param("component_1_input_norm", [], marks=pytest.mark.slow),
    ],
)
def test_wrong_attention_of_layer_1_fails_what_runs_it(
    judge: Any, write_port: Any, preset: str, blame: list[tuple[int, list[str]]]
) -> None:
    exit_code, record = judge(*PRESETS[preset], "--target", write_port(WRONG_ATTENTION))
    assert (exit_code, record["verdict"]) == ((1, "fail") if blame else (0, "pass"))
    assert [(one["layer"], one["sites"]) for one in record["blame"]] == blame


def test_statistics_are_those_of_the_stored_tensors(record_of: Any) -> None:
    record = record_of(*LAYER_0, "--seq-len", 9)
    stored = load_file(Path(record["directory"]) / "layer_0.safetensors")
    (layer,) = record["layers"]
    assert {site["site"] for site in layer["sites"]} == set(stored)
    for site in layer["sites"]:
        tensor = stored[site["site"]]
        assert site["shape"] == list(tensor.shape)
        assert f"torch.{site['dtype']}" == str(tensor.dtype)
        assert (site["num_nan"], site["num_inf"]) == (0, 0)
        assert site["mean"] == pytest.approx(float(tensor.double().mean()), abs=1e-12)
        assert (site["min"], site["max"]) == (float(tensor.min()), float(tensor.max()))


def test_nan_is_counted(record_of: Any, write_port: Any) -> None:
    source = """
class Port(ReferenceLayer):
    def forward(self, hidden_states, attention_mask, position_ids):
        output = super().forward(hidden_states, attention_mask, position_ids)
        output[0, 3, :5] = float("nan")
        output[0, 4, 0] = float("inf")
        return output
"""
    (layer,) = record_of(*LAYER_0, "--seq-len", 9, "--target", write_port(source))["layers"]
    sites = {site["site"]: (site["num_nan"], site["num_inf"]) for site in layer["sites"]}
    assert (sites["output"], sites["moe_delta"]) == ((5, 1), (0, 0))


def test_text_names_the_directory_the_statistics_and_the_verdict(
    run: Any, on_small: tuple[object, ...], tmp_path: Path
) -> None:
    result = run(*LAYER_0, *on_small, "--verbose")
    assert str(tmp_path / "captures/neuron/single_layer_0") in result.stdout.replace("\n", "")
    for word in ("mean", "std", "min", "max", "NaN", "Inf", "moe_delta", "2x24x64", "bfloat16", "PASS"):
        assert word in result.stdout
    assert re.search(r"Layer 0 \(1 of 1\): took \d+:\d\d.*, memory ", result.stderr)


@pytest.mark.parametrize(("level", "num_sites"), [("layer", 2), ("component", 9)])
def test_fewer_sites_are_kept_and_judged(judge: Any, level: str, num_sites: int) -> None:
    exit_code, record = judge("sweep", "--layers", "1:3", "--sites", level)
    assert exit_code == 0
    assert len(record["layers"][0]["sites"]) == num_sites
    assert record["of"] == 2 * (num_sites - 1)


class TestReport:
    @pytest.mark.parametrize(
        "preset",
        [
            pytest.param("sweep_0_to_3", marks=pytest.mark.slow),
            pytest.param("full_model", marks=pytest.mark.slow),
            pytest.param("single_layer_2", marks=pytest.mark.slow),
            "component_1_attention",
        ],
    )
    def test_judged_run_writes_the_same_report_as_a_comparison(
        self,
        run: Any,
        command: Any,
        write_port: Any,
        small_fp8: Path,
        small_golden: Path,
        tmp_path: Path,
        preset: str,
    ) -> None:
        names = ("report.md", "report.txt", "junit.xml", "comparison_report.json", "comparison.csv")
        sides = ("--model", small_fp8, "--golden", small_golden, "--target", write_port(WRONG_ATTENTION))
        folder, again = tmp_path / "report", tmp_path / "again"
        result = run(*PRESETS[preset], *sides, "--report-path", folder)
        assert all(f"written: {folder / name}" in result.stdout for name in names)
        saved = ("--neuron-path", tmp_path / "captures" / "neuron" / preset, "--report-path", again)
        command(mm2_compare, "--gpu-path", small_golden, "--model", small_fp8, *saved)
        for name in names:
            assert (folder / name).read_bytes() == (again / name).read_bytes()

    def test_json_says_nothing_of_the_files(self, judge: Any, tmp_path: Path) -> None:
        assert judge(*LAYER_0, "--report-path", tmp_path / "report")[1]["verdict"] == "pass"
        assert (tmp_path / "report" / "junit.xml").exists()

    def test_run_that_nothing_judges_has_none(
        self, run: Any, small_fp8: Path, on_small: tuple[object, ...], tmp_path: Path
    ) -> None:
        report = ("--report-path", tmp_path / "report")
        refused = run(*LAYER_0, "--model", small_fp8, *report)
        assert (refused.exit_code, "nothing judges this one" in refused.stderr) == (2, True)
        refused = run(*LAYER_0, *on_small, "--undo", "gate_up_swapped", *report)
        assert refused.exit_code == 2
        assert "mm2-diagnose --prove --report-path FOLDER" in refused.stderr
        assert not (tmp_path / "report").exists()


class TestSavedRun:
    def test_show_prints_what_the_run_printed(self, record_of: Any, command: Any) -> None:
        record = record_of(*LAYER_0, "--seq-len", 5)
        shown = json.loads(command(mm2_test, "show", record["directory"], "--json").stdout)
        assert shown.pop("inspection") == {"num_tensors": 21, "faults": []}
        assert shown.pop("next") == [f"mm2-compare --run {record['directory']}"]
        told = {name: value for name, value in record.items() if name not in ("graphs", "inspection", "next")}
        assert shown == told

    def test_skip_compile_judges_the_saved_run_without_running(
        self, judge: Any, write_port: Any, tmp_path: Path
    ) -> None:
        layer, target = ("single-layer", "--layer", 1), write_port(WRONG_ATTENTION)
        first = judge(*layer, "--target", target)
        (tmp_path / "port.py").write_text("raise RuntimeError('it runs')")
        loaded = judge(*layer, "--skip-compile")
        again = judge(*layer, "--skip-compile", "--target", target)
        assert [exit_code for exit_code, _ in (first, loaded, again)] == [1, 1, 1]
        assert loaded[1]["sites"] == first[1]["sites"]
        assert loaded[1]["graphs"] is None

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--layer", 0, "--target", "reference"), "another port: expected reference, found builtin"),
            (("--layer", 1), "another run than --skip-compile asks for"),
            (("--layer", 1, "--output-dir", "nowhere"), "no capture at"),
        ],
    )
    def test_skip_compile_does_not_pass_another_run_off(
        self, run: Any, small_fp8: Path, tmp_path: Path, words: tuple[object, ...], message: str
    ) -> None:
        place = ("--model", small_fp8, "--output-dir", tmp_path / "saved")
        run(*LAYER_0, *place, "--seq-len", 5)
        result = run("single-layer", *place, *words, "--skip-compile")
        assert result.exit_code == 3
        assert message in result.stderr


class TestWhereInputsComeFrom:
    def test_golden_gives_the_first_input_of_a_chained_run(self, judge: Any, small_golden: Path) -> None:
        _, record = judge(*PRESETS["layers_1_to_3"])
        directory = Path(record["directory"])
        expected = load_file(small_golden / "layer_0.safetensors")["output"]
        assert record["description"]["input_source"] == "golden full_model"
        assert torch.equal(load_file(directory / "layer_1.safetensors")["input"], expected)
        assert torch.equal(load_file(directory / "inputs.safetensors")["hidden_states"], expected)
        assert "input" not in load_file(directory / "layer_2.safetensors")

    def test_layers_before_make_the_input_without_a_golden(self, record_of: Any) -> None:
        alone = record_of(*PRESETS["single_layer_2"], "--seq-len", 12)
        chained = record_of("multi-layer", "--layers", "0:3", "--seq-len", 12)
        assert alone["description"]["input_source"] == "tokens through layers 0 to 1: random ids of seed 0"
        mine, theirs = (load_file(Path(one["directory"]) / "layer_2.safetensors") for one in (alone, chained))
        assert torch.equal(mine["output"], theirs["output"])

    def test_random_input_is_recorded_and_cannot_be_judged(
        self, run: Any, record_of: Any, command: Any, on_small: tuple[object, ...], small_golden: Path
    ) -> None:
        layer = PRESETS["single_layer_2"]
        records = [
            record_of(*layer, "--random-input", "--seq-len", "24,15", "--seed", seed) for seed in (8, 7, 7)
        ]
        assert records[1]["description"]["input_source"] == "random numbers of seed 7"
        assert records[1] == records[2]
        assert records[1]["layers"] != records[0]["layers"]
        judged = command(mm2_compare, "--golden", small_golden, "--run", records[1]["directory"])
        for refused in (judged, run(*layer, *on_small, "--skip-compile")):
            assert (refused.exit_code, "random numbers of seed 7" in refused.stderr) == (3, True)

    @pytest.mark.parametrize(
        ("side", "mask"),
        [("left", [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]), ("right", [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])],
    )
    def test_prompts_are_padded_on_the_side_asked_for(
        self, record_of: Any, side: str, mask: list[list[int]]
    ) -> None:
        rows = ("--input-ids", "1,2,3", "--input-ids", "4", "--padding-side", side, "--pad-to", 5)
        inputs = load_file(Path(record_of(*LAYER_0, *rows)["directory"]) / "inputs.safetensors")
        assert inputs["attention_mask"].tolist() == mask


class TestSummary:
    def test_sweep_prints_a_summary(self, run: Any, write_port: Any, on_small: tuple[object, ...]) -> None:
        sides = (*on_small, "--target", write_port(WRONG_ATTENTION), "--backend", "cpu")
        result = run("sweep", *sides, "--json=summary")
        record = json.loads(result.stdout)
        assert (result.exit_code, record["verdict"]) == (1, "fail")
        assert [cause["layers"] for cause in record["cause"]] == [[1]]
        assert record["directory"].endswith("sweep_0_to_3")
        assert len(result.stdout) < 15_000
        # The next commands leave the form of the output out.
        assert not [line for line in record["next"] if "--json" in line]

    def test_summary_without_a_verdict_is_refused(self, run: Any, small_fp8: Path) -> None:
        result = run(*LAYER_0, "--model", small_fp8, "--seq-len", 8, "--json=summary")
        assert result.exit_code == 2
        assert "nothing is judged without a golden" in json.loads(result.stdout)["error"]
