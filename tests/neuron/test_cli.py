"""Runs from the command line, each on the CPU, right and wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compare.cli import main as mm2_compare
from neuron.cli import main as mm2_test

PRESETS: dict[str, tuple[object, ...]] = {
    "single_layer_2": ("single-layer", "--layer", 2),
    "layers_1_to_3": ("multi-layer", "--start-layer", 1, "--end-layer", 3),
    "layers_0_to_1": ("multi-layer", "--layers", "0:2"),
    "sweep_0_to_3": ("sweep",),
    "full_model": ("full",),
    "component_1_attention": ("component", "--layer", 1, "--component", "attention"),
    "component_1_router": ("component", "--layer", 1, "--component", "router"),
    "component_1_experts": ("component", "--layer", 1, "--component", "experts"),
    "component_1_moe": ("component", "--layer", 1, "--component", "moe"),
    "component_1_input_norm": ("component", "--layer", 1, "--component", "input_norm"),
    "component_1_post_norm": ("component", "--layer", 1, "--component", "post_norm"),
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


@pytest.mark.parametrize(
    ("name", "target"),
    [pytest.param(*run, marks=() if run in FAST_RUNS else pytest.mark.slow) for run in EVERY_RUN],
)
def test_clean_target_passes_every_preset(
    run: Any, small_fp8: Path, small_golden: Path, tmp_path: Path, name: str, target: str
) -> None:
    result = run(*PRESETS[name], "--model", small_fp8, "--golden", small_golden, "--target", target, "--json")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["verdict"], record["blame"]) == (0, "pass", [])
    assert record["compared"] == record["of"] > 0
    assert record["directory"] == str(tmp_path / "captures" / "neuron" / name)


@pytest.mark.parametrize(
    ("preset", "exit_code"),
    [
        # TestSummary runs it fast.
        pytest.param("sweep_0_to_3", 1, marks=pytest.mark.slow),
        ("full_model", 1),
        pytest.param("layers_1_to_3", 1, marks=pytest.mark.slow),
        ("component_1_attention", 1),
        ("single_layer_2", 0),
        ("component_1_moe", 0),
        pytest.param("component_1_post_norm", 0, marks=pytest.mark.slow),
        pytest.param("component_1_input_norm", 0, marks=pytest.mark.slow),
    ],
)
def test_wrong_attention_of_layer_1_fails_what_runs_it(
    run: Any, write_port: Any, small_fp8: Path, small_golden: Path, preset: str, exit_code: int
) -> None:
    target = write_port(WRONG_ATTENTION)
    result = run(
        *PRESETS[preset], "--model", small_fp8, "--golden", small_golden, "--target", target, "--json"
    )
    record = json.loads(result.stdout)
    assert result.exit_code == exit_code
    assert record["verdict"] == ("fail" if exit_code else "pass")
    if exit_code:
        assert [(blame["layer"], blame["sites"]) for blame in record["blame"]] == [(1, ["attn_delta"])]


def test_statistics_are_those_of_the_stored_tensors(run: Any, small_fp8: Path) -> None:
    record = json.loads(
        run("single-layer", "--layer", 0, "--model", small_fp8, "--seq-len", 9, "--json").stdout
    )
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


def test_text_names_the_directory_the_statistics_and_the_verdict(
    run: Any, small_fp8: Path, small_golden: Path, tmp_path: Path
) -> None:
    result = run("single-layer", "--layer", 0, "--model", small_fp8, "--golden", small_golden, "--verbose")
    assert str(tmp_path / "captures/neuron/single_layer_0") in result.stdout.replace("\n", "")
    for word in ("mean", "std", "min", "max", "NaN", "Inf", "moe_delta", "2x24x64", "bfloat16", "PASS"):
        assert word in result.stdout
    assert re.search(r"Layer 0 \(1 of 1\): took \d+:\d\d.*, memory ", result.stderr)


def test_nan_is_counted(run: Any, write_port: Any, small_fp8: Path) -> None:
    source = """
class Port(ReferenceLayer):
    def forward(self, hidden_states, attention_mask, position_ids):
        output = super().forward(hidden_states, attention_mask, position_ids)
        output[0, 3, :5] = float("nan")
        output[0, 4, 0] = float("inf")
        return output
"""
    target = write_port(source)
    result = run(
        "single-layer", "--layer", 0, "--model", small_fp8, "--seq-len", 9, "--target", target, "--json"
    )
    sites = {site["site"]: site for site in json.loads(result.stdout)["layers"][0]["sites"]}
    assert (sites["output"]["num_nan"], sites["output"]["num_inf"]) == (5, 1)
    assert (sites["moe_delta"]["num_nan"], sites["moe_delta"]["num_inf"]) == (0, 0)


def test_backend_is_the_cpu_where_nothing_else_is(run: Any, small_fp8: Path) -> None:
    record = json.loads(
        run("single-layer", "--layer", 0, "--model", small_fp8, "--seq-len", 5, "--json").stdout
    )
    assert record["description"]["provenance"]["backend"] == "cpu"


@pytest.mark.parametrize("level", ["layer", "component"])
def test_fewer_sites_are_kept_and_judged(run: Any, small_fp8: Path, small_golden: Path, level: str) -> None:
    result = run("sweep", "--model", small_fp8, "--golden", small_golden, "--sites", level, "--json")
    record = json.loads(result.stdout)
    sites = [site["site"] for site in record["layers"][2]["sites"]]
    assert result.exit_code == 0
    assert len(sites) == {"layer": 2, "component": 9}[level]
    assert record["of"] == 4 * (len(sites) - 1)


class TestReport:
    NAMES = ("report.md", "report.txt", "junit.xml", "comparison_report.json", "comparison.csv")

    @pytest.mark.parametrize(
        "preset",
        [
            "sweep_0_to_3",
            pytest.param("full_model", marks=pytest.mark.slow),
            pytest.param("single_layer_2", marks=pytest.mark.slow),
            "component_1_moe",
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
        sides = ("--model", small_fp8, "--golden", small_golden, "--target", write_port(WRONG_ATTENTION))
        folder = tmp_path / "report"
        result = run(*PRESETS[preset], *sides, "--report-path", folder)
        assert all(f"written: {folder / name}" in result.stdout for name in self.NAMES)
        saved = (
            "--neuron-path",
            tmp_path / "captures" / "neuron" / preset,
            "--report-path",
            tmp_path / "again",
        )
        command(mm2_compare, "--gpu-path", small_golden, "--model", small_fp8, *saved)
        for name in self.NAMES:
            assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()

    def test_report_without_a_golden_is_refused(self, run: Any, small_fp8: Path, tmp_path: Path) -> None:
        result = run("single-layer", "--layer", 0, "--model", small_fp8, "--report-path", tmp_path / "report")
        assert result.exit_code == 2
        assert "nothing judges this one" in result.stderr
        assert not (tmp_path / "report").exists()

    def test_proof_has_no_report(self, run: Any, small_fp8: Path, small_golden: Path, tmp_path: Path) -> None:
        undone = ("--undo", "gate_up_swapped", "--report-path", tmp_path / "report")
        result = run("single-layer", "--layer", 1, "--model", small_fp8, "--golden", small_golden, *undone)
        assert result.exit_code == 2
        assert "mm2-diagnose --prove --report-path FOLDER" in result.stderr

    def test_json_says_nothing_of_the_files(
        self, run: Any, on_small: tuple[object, ...], tmp_path: Path
    ) -> None:
        sides = (*on_small, "--report-path", tmp_path / "report", "--json")
        assert json.loads(run("single-layer", "--layer", 0, *sides).stdout)["verdict"] == "pass"
        assert (tmp_path / "report" / "junit.xml").exists()


class TestSavedRun:
    def test_show_prints_what_the_run_printed(self, run: Any, command: Any, small_fp8: Path) -> None:
        record = json.loads(
            run("single-layer", "--layer", 0, "--model", small_fp8, "--seq-len", 5, "--json").stdout
        )
        shown = json.loads(command(mm2_test, "show", record["directory"], "--json").stdout)
        assert shown.pop("inspection") == {"num_tensors": 21, "faults": []}
        assert shown.pop("next") == [f"mm2-compare --run {record['directory']}"]
        told = {name: value for name, value in record.items() if name not in ("graphs", "inspection", "next")}
        assert shown == told

    def test_skip_compile_judges_the_saved_run_without_running(
        self, run: Any, write_port: Any, small_fp8: Path, small_golden: Path, tmp_path: Path
    ) -> None:
        target = write_port(WRONG_ATTENTION)
        arguments = ("single-layer", "--layer", 1, "--model", small_fp8, "--golden", small_golden, "--json")
        first = run(*arguments, "--target", target)
        (tmp_path / "port.py").write_text("raise RuntimeError('it runs')")
        loaded = run(*arguments, "--skip-compile")
        again = run(*arguments, "--skip-compile", "--target", target)
        assert [result.exit_code for result in (first, loaded, again)] == [1, 1, 1]
        assert json.loads(loaded.stdout)["sites"] == json.loads(first.stdout)["sites"]
        assert json.loads(loaded.stdout)["graphs"] is None

    def test_skip_compile_does_not_pass_another_targets_run_off(self, run: Any, small_fp8: Path) -> None:
        run("single-layer", "--layer", 0, "--model", small_fp8, "--seq-len", 5)
        result = run(
            "single-layer", "--layer", 0, "--model", small_fp8, "--target", "reference", "--skip-compile"
        )
        assert result.exit_code == 3
        assert "a run of another port: expected reference, found builtin" in result.stderr

    def test_skip_compile_does_not_pass_another_run_off(
        self, run: Any, small_fp8: Path, tmp_path: Path
    ) -> None:
        directory = tmp_path / "saved"
        run("single-layer", "--layer", 0, "--model", small_fp8, "--seq-len", 5, "--output-dir", directory)
        result = run(
            "single-layer", "--layer", 1, "--model", small_fp8, "--output-dir", directory, "--skip-compile"
        )
        assert result.exit_code == 3
        assert "another run than --skip-compile asks for" in result.stderr

    def test_skip_compile_without_a_saved_run_says_so(self, run: Any, small_fp8: Path) -> None:
        result = run("single-layer", "--layer", 0, "--model", small_fp8, "--skip-compile")
        assert result.exit_code == 3
        assert "no capture at" in result.stderr


class TestWhereInputsComeFrom:
    def test_golden_gives_the_first_input_of_a_chained_run(
        self, run: Any, small_fp8: Path, small_golden: Path
    ) -> None:
        record = json.loads(
            run(*PRESETS["layers_1_to_3"], "--model", small_fp8, "--golden", small_golden, "--json").stdout
        )
        directory = Path(record["directory"])
        expected = load_file(small_golden / "layer_0.safetensors")["output"]
        assert record["description"]["input_source"] == "golden full_model"
        assert torch.equal(load_file(directory / "layer_1.safetensors")["input"], expected)
        assert torch.equal(load_file(directory / "inputs.safetensors")["hidden_states"], expected)
        assert "input" not in load_file(directory / "layer_2.safetensors")

    def test_layers_before_make_the_input_without_a_golden(
        self, run: Any, small_fp8: Path, tmp_path: Path
    ) -> None:
        tokens = ("--model", small_fp8, "--seq-len", 12, "--json")
        alone = json.loads(run("single-layer", "--layer", 2, *tokens).stdout)
        chained = json.loads(run("multi-layer", "--layers", "0:3", *tokens).stdout)
        assert alone["description"]["input_source"] == "tokens through layers 0 to 1: random ids of seed 0"
        mine = load_file(Path(alone["directory"]) / "layer_2.safetensors")
        theirs = load_file(Path(chained["directory"]) / "layer_2.safetensors")
        assert torch.equal(mine["output"], theirs["output"])

    def test_random_input_is_recorded(self, run: Any, small_fp8: Path) -> None:
        arguments: tuple[object, ...] = ("single-layer", "--layer", 2)
        arguments += ("--model", small_fp8, "--random-input", "--seq-len", 12, "--json")
        records = [json.loads(run(*arguments, "--seed", seed).stdout) for seed in (7, 7, 8)]
        assert records[0]["description"]["input_source"] == "random numbers of seed 7"
        assert records[0] == records[1]
        assert records[0]["layers"] != records[2]["layers"]

    def test_run_on_random_input_cannot_be_judged(
        self, run: Any, command: Any, small_fp8: Path, small_golden: Path
    ) -> None:
        arguments: tuple[object, ...] = ("single-layer", "--layer", 2, "--model", small_fp8)
        arguments += ("--random-input", "--seq-len", "24,15", "--json")
        directory = json.loads(run(*arguments).stdout)["directory"]
        judged = command(mm2_compare, "--golden", small_golden, "--run", directory)
        skipped = run(
            *PRESETS["single_layer_2"], "--model", small_fp8, "--golden", small_golden, "--skip-compile"
        )
        assert (judged.exit_code, skipped.exit_code) == (3, 3)
        assert "random numbers of seed 0" in judged.stderr
        assert "random numbers of seed 0" in skipped.stderr

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_prompts_are_padded_on_the_side_asked_for(self, run: Any, small_fp8: Path, side: str) -> None:
        arguments = (
            "single-layer",
            "--layer",
            0,
            "--model",
            small_fp8,
            "--input-ids",
            "1,2,3",
            "--input-ids",
            "4",
        )
        record = json.loads(run(*arguments, "--padding-side", side, "--pad-to", 5, "--json").stdout)
        mask = load_file(Path(record["directory"]) / "inputs.safetensors")["attention_mask"].tolist()
        assert (
            mask
            == {"right": [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], "left": [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]}[side]
        )


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
        result = run("single-layer", "--layer", 0, "--model", small_fp8, "--seq-len", 8, "--json=summary")
        assert result.exit_code == 2
        assert "nothing is judged without a golden" in json.loads(result.stdout)["error"]
