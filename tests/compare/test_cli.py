from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.cli import main as mm2_compare
from minimax_tools.model.run import full_run, single_layer_run
from minimax_tools.model.sites import ModelSite, Site
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]

NUM_LAYERS = 4
SWAPPED_PORT = """
from minimax_tools.reference.layer import ReferenceLayer


class DecoderLayer(ReferenceLayer):
    @staticmethod
    def convert_state_dict(tensors, config, layer_idx):
        swapped = {"w1.weight": "w3.weight", "w3.weight": "w1.weight"}
        if layer_idx != 2:
            return dict(tensors)
        return {name[:-9] + swapped.get(name[-9:], name[-9:]): tensor for name, tensor in tensors.items()}
"""


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() / 2).to(tensor.dtype)


def rolled(tensor: torch.Tensor) -> torch.Tensor:
    """Move every channel one place on."""
    return tensor.roll(1, -1)


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() * 2).to(tensor.dtype)


def read_record(result: click.testing.Result) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(result.stdout)
    return record


@pytest.fixture
def passing(copyist: Any) -> Path:
    path: Path = copyist.device_run(name="passing")
    return path


@pytest.fixture
def failing(copyist: Any) -> Path:
    path: Path = copyist.device_run({(2, Site.MOE_DELTA): halved}, name="failing")
    return path


@pytest.fixture
def wrong_output(copyist: Any) -> Path:
    path: Path = copyist.device_run({(2, Site.OUTPUT): rolled}, name="wrong_output")
    return path


@pytest.fixture(scope="module")
def swapped(toy: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of a port in which gate and up are swapped in layer 2."""
    folder = tmp_path_factory.mktemp("swapped")
    (folder / "port.py").write_text(SWAPPED_PORT, encoding="utf-8")
    arguments = ["sweep", "--model", toy, "--golden", golden]
    arguments += ["--target", f"{folder / 'port.py'}:DecoderLayer"]
    options = ["--backend", "cpu", "--output-dir", folder / "run", "--quiet"]
    result = click.testing.CliRunner().invoke(mm2_test, [str(part) for part in (*arguments, *options)])
    assert result.exit_code == 1, result.output
    return folder / "run"


class TestVerdict:
    def test_pass_exits_with_0(self, golden: Path, passing: Path, command: Command) -> None:
        result = command(mm2_compare, "--golden", golden, "--run", passing, "--quiet")
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.startswith("PASS\ncompared 68 of 68 sites in 4 layers")

    def test_failure_exits_with_1_and_says_where_first(
        self, golden: Path, failing: Path, command: Command
    ) -> None:
        result = command(mm2_compare, "--golden", golden, "--run", failing, "--quiet")
        assert result.exit_code == 1
        assert result.stdout.startswith("FAIL: layer 2, moe_delta")

    def test_warning_exits_with_0(self, copyist: Any, compare: Any) -> None:
        target = copyist.device_run(observed_dtypes={"router_gate": "bfloat16"})
        exit_code, record = compare(target)
        assert (exit_code, record["verdict"]) == (0, "warn")

    def test_wrong_usage_exits_with_2(self, golden: Path, passing: Path, command: Command) -> None:
        sides = ("--golden", golden, "--run", passing, "--quiet")
        both = command(mm2_compare, *sides, "--layer", "layer_1", "--layer-pattern", "layer_*")
        assert both.exit_code == 2
        assert "--layer and --layer-pattern were both given. Use one of them." in both.stderr
        assert command(mm2_compare, *sides, "--layer", "01").exit_code == 0
        nothing = command(mm2_compare, *sides, "--layer", "layer_9")
        assert nothing.exit_code == 2
        assert "no layer matches 'layer_9'" in nothing.stderr
        assert command(mm2_compare, *sides, "--criteria", "lenient").exit_code == 2

    def test_incomparable_exits_with_3_and_says_why(
        self, golden: Path, copyist: Any, command: Command
    ) -> None:
        target = copyist.device_run({(0, Site.INPUT): halved}, run=single_layer_run(0, sites_level="all"))
        result = command(mm2_compare, "--golden", golden, "--run", target, "--quiet")
        assert (result.exit_code, result.stdout) == (3, "")
        assert "the captures have different inputs: layer 0 got other hidden states" in result.stderr
        *_, title, again = result.stderr.splitlines()
        assert title == "Next"
        assert again.startswith("  mm2-test single-layer --layer 0 --model ")
        assert f" --golden {golden} " in again
        assert "Traceback" not in result.stderr

    def test_missing_capture_exits_with_3(self, golden: Path, command: Command, tmp_path: Path) -> None:
        result = command(mm2_compare, "--golden", golden, "--run", tmp_path / "gone")
        assert result.exit_code == 3
        assert "there is no capture directory" in result.stderr

    def test_progress_goes_to_stderr(self, golden: Path, passing: Path, command: Command) -> None:
        result = command(mm2_compare, "--golden", golden, "--run", passing, "--json")
        assert read_record(result)["verdict"] == "pass"
        assert result.stderr.splitlines() == [f"Layer {layer} compared." for layer in range(NUM_LAYERS)]


class TestJson:
    def test_one_object_holds_verdict_extent_and_blame(
        self, golden: Path, failing: Path, compare: Any
    ) -> None:
        _, record = compare(failing)
        assert (record["verdict"], record["compared"], record["of"]) == ("fail", 68, 68)
        (blame,) = record["blame"]
        keys = {"layer", "sites", "reason", "right", "operation", "is_of_weights", "in_chunks"}
        assert set(blame) == keys
        assert (blame["layer"], blame["sites"]) == (2, ["moe_delta"])
        assert (record["reference"], record["target"]) == (str(golden), str(failing))

    def test_blame_outside_the_layers_has_no_layer(self, copyist: Any, compare: Any) -> None:
        run = full_run(NUM_LAYERS, sites_level="layer")
        _, record = compare(copyist.device_run({(None, ModelSite.LOGITS): halved}, run=run))
        assert [(blame["layer"], blame["sites"]) for blame in record["blame"]] == [(None, ["logits"])]

    def test_errors_are_json_too(self, golden: Path, passing: Path, command: Command, tmp_path: Path) -> None:
        gone = command(mm2_compare, "--golden", golden, "--run", tmp_path / "gone", "--json")
        record = read_record(gone)
        figures = record["compared"], record["of"], record["blame"]
        assert (record["verdict"], *figures) == ("incomparable", 0, 0, [])
        assert "there is no capture directory" in record["error"]
        assert record["exit_code"] == gone.exit_code == 3
        sides = ("--golden", golden, "--run", passing)
        usage = command(mm2_compare, *sides, "--layer", "layer_9", "--json")
        record = read_record(usage)
        assert record["exit_code"] == usage.exit_code == 2
        assert "verdict" not in record


class TestCriteria:
    def test_swapped_gate_and_up_passes_the_classic_cosine_of_its_output(
        self, swapped: Path, compare: Any
    ) -> None:
        _, record = compare(swapped, None, "--criteria", "classic", "--layer", "2")
        sites = {site["site"]: site for site in record["sites"]}
        assert sites["output"]["metrics"]["cosine_similarity"] > 0.99
        assert not any("cosine" in failure for failure in sites["output"]["classic_failures"])
        assert sites["moe_delta"]["metrics"]["cosine_similarity"] < 0.9
        assert any("cosine" in failure for failure in sites["moe_delta"]["classic_failures"])

    def test_tolerances_decide_what_is_close(self, failing: Path, compare: Any) -> None:
        def close_fraction(*options: str) -> float:
            _, record = compare(failing, None, *options)
            sites = {(site["layer"], site["site"]): site for site in record["sites"]}
            return float(sites[2, "moe_delta"]["metrics"]["close_fraction"])

        assert close_fraction("--rtol", "0", "--atol", "0") < close_fraction() < 0.5
        assert close_fraction("--rtol", "0.6") == 1.0


class TestClassic:
    def test_site_beyond_the_limits_does_not_fail(self, failing: Path, compare: Any) -> None:
        assert compare(failing, None, "--criteria", "classic")[0] == 0
        assert compare(failing)[0] == 1

    def test_output_beyond_the_limits_fails(self, wrong_output: Path, compare: Any) -> None:
        exit_code, record = compare(wrong_output, None, "--criteria", "classic")
        assert (exit_code, record["criteria"], record["blame"][0]["layer"]) == (1, "classic", 2)
        assert "mean_abs_diff" in record["blame"][0]["reason"]
        assert record["blame"][0]["sites"][-1] == "output"
        assert all(site["noise"] is None for site in record["sites"])
        assert any("max_abs_diff <= 0.01, mean_abs_diff <= 0.001" in note for note in record["notes"])

    def test_all_five_limits_can_be_set(self, golden: Path, wrong_output: Path, command: Command) -> None:
        sides = ("--golden", golden, "--run", wrong_output, "--criteria", "classic", "--quiet")
        wide: dict[str, str] = {
            "--max-abs-diff": "1e9",
            "--mean-abs-diff": "1e9",
            "--similarity-percentage": "0",
            "--cosine-similarity": "-1",
            "--pearson-correlation": "-1",
        }
        strict = {
            "--max-abs-diff": ("0", "max_abs_diff"),
            "--mean-abs-diff": ("0", "mean_abs_diff"),
            "--similarity-percentage": ("99.99", "close_fraction"),
            "--cosine-similarity": ("0.99", "cosine_similarity"),
            "--pearson-correlation": ("0.99", "pearson_correlation"),
        }
        assert command(mm2_compare, *sides, *(word for pair in wide.items() for word in pair)).exit_code == 0
        for option, (value, name) in strict.items():
            words = [word for pair in {**wide, option: value}.items() for word in pair]
            result = command(mm2_compare, *sides, *words, "--json")
            (blame,) = read_record(result)["blame"]
            assert result.exit_code == 1
            assert blame["reason"].startswith(f"output: {name}")
            assert [other for _, other in strict.values() if other in blame["reason"]] == [name]

    def test_limit_without_classic_is_refused(self, golden: Path, passing: Path, command: Command) -> None:
        sides = ("--golden", golden, "--run", passing, "--quiet")
        result = command(mm2_compare, *sides, "--max-abs-diff", "1")
        assert result.exit_code == 2
        assert "--max-abs-diff belongs to the classic limits, and --criteria noise" in result.stderr
        beyond = command(mm2_compare, *sides, "--criteria", "classic", "--similarity-percentage", "101")
        assert beyond.exit_code == 2

    def test_chained_run_fails_and_blames_nobody(self, copyist: Any, compare: Any) -> None:
        run = full_run(NUM_LAYERS, sites_level="layer")
        target = copyist.device_run({(0, Site.OUTPUT): doubled}, run=run)
        exit_code, record = compare(target, None, "--criteria", "classic")
        assert (exit_code, record["verdict"], record["blame"]) == (1, "fail", [])
        failing = [site["layer"] for site in record["sites"] if site["status"] == "fail"]
        assert failing == [0]

    def test_run_without_outputs_is_no_pass(self, copyist: Any, compare: Any) -> None:
        target = copyist.device_run(not_exposed=(Site.OUTPUT,))
        exit_code, record = compare(target, None, "--criteria", "classic")
        assert (exit_code, record["verdict"]) == (3, "incomparable")
        assert any("no output of layers 0-3 was compared" in note for note in record["notes"])

    def test_device_command_takes_the_limits_too(
        self, toy: Path, golden: Path, command: Command, tmp_path: Path
    ) -> None:
        words = ("single-layer", "--layer", "1", "--model", toy, "--golden", golden, "--backend", "cpu")
        saved = (
            *words,
            "--output-dir",
            tmp_path / "run",
            "--criteria",
            "classic",
            "--quiet",
            "--max-abs-diff",
            "0.1",
        )
        right = command(mm2_test, *saved)
        assert right.exit_code == 0, right.output
        assert "cosine" in right.stdout
        strict = command(
            mm2_test, *saved, "--skip-compile", "--cosine-similarity", "1", "--max-abs-diff", "0"
        )
        assert strict.exit_code == 1
        assert "max_abs_diff" in strict.stdout

    def test_device_layer_passes_at_its_outputs(self, golden: Path, passing: Path, command: Command) -> None:
        options = ("--criteria", "classic", "--json", "--quiet")
        result = command(mm2_compare, "--golden", golden, "--run", passing, *options)
        record = read_record(result)
        assert (result.exit_code, record["verdict"], record["compared"], record["of"]) == (
            0,
            "pass",
            NUM_LAYERS,
            68,
        )
        statuses = {(site["site"] == "output", site["status"]) for site in record["sites"]}
        assert statuses == {(True, "pass"), (False, "not judged")}
        assert all(site["metrics"] for site in record["sites"] if site["site"] != "router_experts")


class TestLayers:
    @pytest.mark.parametrize("layer", ["layer_1", "1"])
    def test_one_layer_can_be_named_both_ways(self, layer: str, failing: Path, compare: Any) -> None:
        _, record = compare(failing, None, "--layer", layer)
        assert (record["verdict"], record["of"]) == ("pass", 17)
        assert {site["layer"] for site in record["sites"]} == {1}

    def test_pattern_chooses_several(self, golden: Path, failing: Path, command: Command) -> None:
        sides = ("--golden", golden, "--run", failing, "--json", "--quiet")
        record = read_record(command(mm2_compare, *sides, "--layer-pattern", "layer_[0-1]"))
        assert [site["layer"] for site in record["sites"]] == [0] * 17 + [1] * 17


class TestReports:
    def test_report_is_written_for_people_and_programs(
        self, golden: Path, failing: Path, command: Command, tmp_path: Path
    ) -> None:
        folder = tmp_path / "reports" / "today"
        sides = ("--golden", golden, "--run", failing)
        result = command(mm2_compare, *sides, "--report-path", folder, "--quiet")
        assert result.exit_code == 1
        names = {"report.md", "report.txt", "junit.xml", "comparison_report.json"}
        names |= {"comparison_summary.json", "comparison.csv"}
        assert {path.name for path in folder.iterdir()} - {"report.html"} == names
        assert all(f"written: {folder / name}" in result.stdout for name in names)
        report = json.loads((folder / "comparison_report.json").read_text(encoding="utf-8"))
        printed = read_record(command(mm2_compare, *sides, "--json", "--quiet"))
        assert report == printed
        with (folder / "comparison.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["site"] for row in rows if row["status"] == "fail"] == ["moe_delta"]

    def test_report_that_cannot_be_written_exits_with_3(
        self, golden: Path, passing: Path, command: Command, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        sides = ("--golden", golden, "--run", passing, "--quiet")
        result = command(mm2_compare, *sides, "--report-path", tmp_path / "file" / "reports")
        assert result.exit_code == 3
        assert "cannot write the report" in result.stderr


class TestNewestCaptures:
    @pytest.fixture
    def captures(self, copyist: Any, tmp_path: Path) -> Path:
        """A golden, an older device run that passes, and a newer one that does not."""
        copyist.golden(name="captures/gpu_reference/full_model")
        old = copyist.device_run(name="captures/neuron/sweep_0_to_3")
        os.utime(old / "manifest.json", (1, 1))
        copyist.device_run({(2, Site.MOE_DELTA): halved}, name="captures/neuron/single_layer_2")
        return tmp_path / "captures"

    def test_newest_of_both_sides_are_compared(
        self, captures: Path, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MM2_CAPTURES", str(captures))
        result = command(mm2_compare, "--layer-pattern", "layer_*", "--json", "--quiet")
        record = read_record(result)
        assert (result.exit_code, record["blame"][0]["layer"]) == (1, 2)
        assert record["reference"] == str(captures / "gpu_reference" / "full_model")
        assert record["target"] == str(captures / "neuron" / "single_layer_2")

    def test_named_capture_wins_over_the_newest(self, captures: Path, command: Command) -> None:
        old = captures / "neuron" / "sweep_0_to_3"
        result = command(mm2_compare, "--captures", captures, "--run", old, "--json", "--quiet")
        record = read_record(result)
        assert (result.exit_code, record["target"]) == (0, str(old))

    def test_folder_without_captures_says_how_to_make_one(self, command: Command, tmp_path: Path) -> None:
        result = command(mm2_compare, "--captures", tmp_path)
        assert result.exit_code == 3
        assert f"no capture under {tmp_path / 'gpu_reference'}" in result.stderr
        assert "mm2-gpu extract-all" in result.stderr


def test_help_begins_with_a_verb_and_ends_with_an_example(command: Command) -> None:
    result = command(mm2_compare, "--help")
    assert result.exit_code == 0
    assert "\n  Judge a port's run against a golden" in result.stdout
    assert "\n  Example: mm2-compare --layer-pattern 'layer_*'\n" in result.stdout


class TestNamesOfTheSides:
    """The owner's --gpu-path and --neuron-path are second names of --golden and --run."""

    OLD = ("--gpu-path", "--neuron-path")

    def test_second_names_judge_the_same(self, command: Any, golden: Path, passing: Path) -> None:
        new = command(mm2_compare, "--golden", golden, "--run", passing, "--json", "--quiet")
        old = command(mm2_compare, self.OLD[0], golden, self.OLD[1], passing, "--json", "--quiet")
        assert old.exit_code == new.exit_code == 0
        assert old.stdout == new.stdout

    def test_errors_say_the_first_names(self, command: Any, tmp_path: Path) -> None:
        for old, new in (("--gpu-map", "--golden-map"), ("--neuron-map", "--run-map")):
            result = command(mm2_compare, old, tmp_path / "gone.yaml")
            assert result.exit_code == 2
            assert f"Invalid value for '{new}'" in result.stderr
            assert old not in result.stderr

    def test_missing_sides_are_asked_for_by_their_names(self, command: Any, tmp_path: Path) -> None:
        result = command(mm2_compare, "--captures", tmp_path)
        assert result.exit_code == 3
        assert "or name one with --golden" in result.stderr

    def test_one_side_under_both_names_is_the_last_given(
        self, command: Any, golden: Path, passing: Path, tmp_path: Path
    ) -> None:
        sides = ("--golden", tmp_path / "gone", self.OLD[0], golden, "--run", passing)
        assert command(mm2_compare, *sides, "--quiet").exit_code == 0


class TestSummary:
    """`--json=summary`: the small form."""

    def test_summary_holds_coverage_limits_and_causes(
        self, command: Command, golden: Path, failing: Path
    ) -> None:
        sides = ("--golden", golden, "--run", failing, "--quiet")
        result = command(mm2_compare, *sides, "--json=summary")
        record = read_record(result)
        assert (result.exit_code, record["verdict"], record["schema_version"]) == (1, "fail", 2)
        assert record["coverage"]["compared"] == record["coverage"]["of"] == 68
        assert record["coverage"]["layers"] == [0, 1, 2, 3]
        assert record["coverage"]["not_compared"] == []
        worst = record["limits"][0]
        assert (worst["layer"], worst["site"], worst["status"]) == (2, "moe_delta", "fail")
        assert worst["value"] > worst["limit"]
        (cause,) = record["cause"]
        assert (cause["layers"], cause["sites"], cause["severity"]) == ([2], ["moe_delta"], "fail")
        assert record["next"]
        assert "sites" not in record
        whole = command(mm2_compare, *sides, "--json")
        assert len(result.stdout) < len(whole.stdout) / 5
        assert set(record) - {"coverage", "limits", "cause", "statuses", "worst"} == set(
            read_record(whole)
        ) - {"sites"}

    def test_summary_of_a_pass_names_no_cause(self, command: Command, golden: Path, passing: Path) -> None:
        record = read_record(command(mm2_compare, "--golden", golden, "--run", passing, "--json=summary"))
        assert (record["verdict"], record["cause"]) == ("pass", [])
        assert all(limit["value"] < limit["limit"] for limit in record["limits"])

    def test_place_is_told_as_numbers_too(self, copyist: Any, compare: Any) -> None:
        def spoilt(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.clone()
            tensor[..., 64:128] *= 2  # head 1 of the toy's, whose heads have 64 dims
            return tensor

        run = copyist.device_run({(1, Site.Q_PROJ): spoilt}, name="head")
        _, record = compare(run, None, "--json=summary")
        (cause,) = record["cause"]
        assert cause["sites"] == ["q_proj"]
        assert any("of head 1" in sentence for sentence in cause["where"])
        (region,) = [region for region in cause["regions"] if region["heads"]]
        assert region["heads"] == [1]
        assert region["num_wrong"] == region["num_held"] == 64

    def test_error_is_one_object_under_a_summary_too(self, command: Command, tmp_path: Path) -> None:
        result = command(mm2_compare, "--golden", tmp_path / "gone", "--run", tmp_path, "--json=summary")
        assert result.exit_code == 3
        assert "error" in read_record(result)

    def test_other_forms_are_refused(self, command: Command) -> None:
        result = command(mm2_compare, "--json=sumary")
        assert result.exit_code == 2
        assert "Did you mean summary?" in result.stderr
