from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.cli import main as mm2_compare
from compare.diagnosis.cli import main as mm2_diagnose
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import full_run, single_layer_run
from minimax_tools.model.sites import ModelSite, Site
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]

NUM_LAYERS = 4
CLASSIC = ("--criteria", "classic")


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() / 2).to(tensor.dtype)


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() * 2).to(tensor.dtype)


def read_record(result: click.testing.Result) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(result.stdout)
    return record


@pytest.fixture(scope="module")
def passing(shared_copyist: Any) -> Path:
    path: Path = shared_copyist.device_run(name="passing")
    return path


@pytest.fixture(scope="module")
def failing(shared_copyist: Any) -> Path:
    path: Path = shared_copyist.device_run({(2, Site.MOE_DELTA): halved}, name="failing")
    return path


@pytest.fixture(scope="module")
def wrong_output(shared_copyist: Any) -> Path:
    """A run whose layer 2 has every channel one place on."""
    changes = {(2, Site.OUTPUT): lambda tensor: tensor.roll(1, -1)}
    path: Path = shared_copyist.device_run(changes, name="wrong_output")
    return path


@pytest.fixture(scope="module")
def failure(golden: Path, failing: Path) -> click.testing.Result:
    """Result of the command on the failing run, as JSON."""
    arguments = ["--golden", str(golden), "--run", str(failing), "--json", "--quiet"]
    return click.testing.CliRunner().invoke(mm2_compare, arguments)


class TestVerdict:
    def test_pass_exits_with_0(self, golden: Path, passing: Path, command: Command) -> None:
        result = command(mm2_compare, "--golden", golden, "--run", passing, "--quiet")
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.startswith("PASS\ncompared 68 of 68 sites in 4 layers")

    def test_failure_exits_with_1_and_says_where(self, golden: Path, failing: Path, command: Command) -> None:
        result = command(mm2_compare, "--golden", golden, "--run", failing)
        assert result.exit_code == 1
        assert result.stdout.startswith("FAIL: layer 2, moe_delta")
        # Progress goes to stderr.
        assert result.stderr.splitlines() == [f"Layer {layer} compared." for layer in range(NUM_LAYERS)]

    def test_warning_exits_with_0(self, copyist: Any, compare: Any) -> None:
        exit_code, record = compare(copyist.device_run(observed_dtypes={"router_gate": "bfloat16"}))
        assert (exit_code, record["verdict"]) == (0, "warn")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--layer", "1", "--layer-pattern", "layer_*"), "--layer and --layer-pattern were both given."),
            (("--layer", "layer_9"), "no layer matches 'layer_9'"),
            (("--criteria", "lenient"), "lenient"),
            (("--max-abs-diff", "1"), "--max-abs-diff belongs to the classic limits, and --criteria noise"),
            ((*CLASSIC, "--similarity-percentage", "101"), "101"),
            (("--json=sumary",), "Did you mean summary?"),
        ],
    )
    def test_wrong_usage_exits_with_2(
        self, options: tuple[str, ...], words: str, golden: Path, passing: Path, command: Command
    ) -> None:
        result = command(mm2_compare, "--golden", golden, "--run", passing, *options)
        assert (result.exit_code, words in result.stderr) == (2, True)

    def test_incomparable_exits_with_3_and_why(self, golden: Path, copyist: Any, command: Command) -> None:
        target = copyist.device_run({(0, Site.INPUT): halved}, run=single_layer_run(0, sites_level="all"))
        result = command(mm2_compare, "--golden", golden, "--run", target, "--quiet")
        assert (result.exit_code, result.stdout) == (3, "")
        assert "the captures have different inputs: layer 0 got other hidden states" in result.stderr
        *_, title, again = result.stderr.splitlines()
        assert title == "Next"
        assert again.startswith("  mm2-test single-layer --layer 0 --model ")
        assert f" --golden {golden} " in again
        assert "Traceback" not in result.stderr


class TestJson:
    def test_one_object_holds_verdict_extent_and_blame(
        self, golden: Path, failing: Path, failure: click.testing.Result
    ) -> None:
        record = read_record(failure)
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
        for form in ("--json", "--json=summary"):
            gone = command(mm2_compare, "--golden", golden, "--run", tmp_path / "gone", form)
            record = read_record(gone)
            figures = record["compared"], record["of"], record["blame"]
            assert (record["verdict"], *figures) == ("incomparable", 0, 0, [])
            assert "there is no capture directory" in record["error"]
            assert record["exit_code"] == gone.exit_code == 3
        usage = command(mm2_compare, "--golden", golden, "--run", passing, "--layer", "layer_9", "--json")
        record = read_record(usage)
        assert record["exit_code"] == usage.exit_code == 2
        assert "verdict" not in record


class TestCriteria:
    def test_swapped_gate_and_up_passes_the_cosine_of_its_output(self, runs: Any, compare: Any) -> None:
        _, record = compare(runs["swapped"].directory, None, *CLASSIC, "--layer", "1")
        sites = {site["site"]: site for site in record["sites"]}
        assert sites["output"]["metrics"]["cosine_similarity"] > 0.99
        assert not any("cosine" in failure for failure in sites["output"]["classic_failures"])
        assert sites["moe_delta"]["metrics"]["cosine_similarity"] < 0.9
        assert any("cosine" in failure for failure in sites["moe_delta"]["classic_failures"])

    def test_tolerances_decide_what_is_close(self, failing: Path, compare: Any) -> None:
        def close_fraction(*options: str) -> float:
            _, record = compare(failing, None, "--layer", "2", *options)
            sites = {site["site"]: site for site in record["sites"]}
            return float(sites["moe_delta"]["metrics"]["close_fraction"])

        assert close_fraction("--rtol", "0", "--atol", "0") < close_fraction() < 0.5
        assert close_fraction("--rtol", "0.6") == 1.0


class TestClassic:
    def test_outputs_alone_are_judged(self, failing: Path, compare: Any) -> None:
        exit_code, record = compare(failing, None, *CLASSIC)
        assert (exit_code, record["verdict"]) == (0, "pass")
        assert (record["compared"], record["of"]) == (NUM_LAYERS, 68)
        statuses = {(site["site"] == "output", site["status"]) for site in record["sites"]}
        assert statuses == {(True, "pass"), (False, "not judged")}
        assert all(site["metrics"] for site in record["sites"] if site["site"] != "router_experts")

    def test_output_beyond_the_limits_fails(self, wrong_output: Path, compare: Any) -> None:
        exit_code, record = compare(wrong_output, None, *CLASSIC)
        assert (exit_code, record["criteria"], record["blame"][0]["layer"]) == (1, "classic", 2)
        assert "mean_abs_diff" in record["blame"][0]["reason"]
        assert record["blame"][0]["sites"][-1] == "output"
        assert all(site["noise"] is None for site in record["sites"])
        assert any("max_abs_diff <= 0.01, mean_abs_diff <= 0.001" in note for note in record["notes"])

    def test_all_five_limits_can_be_set(self, wrong_output: Path, compare: Any) -> None:
        wide = {
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

        def judge(limits: dict[str, str]) -> tuple[int, dict[str, Any]]:
            words = [word for pair in limits.items() for word in pair]
            found: tuple[int, dict[str, Any]] = compare(wrong_output, None, *CLASSIC, "--layer", "2", *words)
            return found

        assert judge(wide)[0] == 0
        for option, (value, name) in strict.items():
            exit_code, record = judge({**wide, option: value})
            (blame,) = record["blame"]
            assert exit_code == 1
            assert blame["reason"].startswith(f"output: {name}")
            assert [other for _, other in strict.values() if other in blame["reason"]] == [name]

    def test_chained_run_fails_and_blames_nobody(self, copyist: Any, compare: Any) -> None:
        run = full_run(NUM_LAYERS, sites_level="layer")
        target = copyist.device_run({(0, Site.OUTPUT): doubled}, run=run)
        exit_code, record = compare(target, None, *CLASSIC)
        assert (exit_code, record["verdict"], record["blame"]) == (1, "fail", [])
        assert [site["layer"] for site in record["sites"] if site["status"] == "fail"] == [0]

    def test_run_without_outputs_is_no_pass(self, copyist: Any, compare: Any) -> None:
        target = copyist.device_run(not_exposed=(Site.OUTPUT,))
        exit_code, record = compare(target, None, *CLASSIC)
        assert (exit_code, record["verdict"]) == (3, "incomparable")
        assert any("no output of layers 0-3 was compared" in note for note in record["notes"])

    def test_device_command_takes_limits(self, toy: Path, golden: Path, command: Any, tmp_path: Path) -> None:
        words = ("single-layer", "--layer", "1", "--model", toy, "--golden", golden, "--backend", "cpu")
        saved = (*words, "--output-dir", tmp_path / "run", *CLASSIC, "--quiet")
        right = command(mm2_test, *saved, "--max-abs-diff", "0.1")
        assert right.exit_code == 0, right.output
        assert "cosine" in right.stdout
        limits = ("--cosine-similarity", "1", "--max-abs-diff", "0")
        strict = command(mm2_test, *saved, "--skip-compile", *limits)
        assert strict.exit_code == 1
        assert "max_abs_diff" in strict.stdout


@pytest.mark.parametrize(
    ("option", "value", "layers"),
    [("--layer", "layer_1", [1]), ("--layer", "1", [1]), ("--layer-pattern", "layer_[0-1]", [0, 1])],
)
def test_layers_are_chosen_by_name_number_and_pattern(
    option: str, value: str, layers: list[int], failing: Path, compare: Any
) -> None:
    _, record = compare(failing, None, option, value)
    assert (record["verdict"], record["of"]) == ("pass", 17 * len(layers))
    assert [site["layer"] for site in record["sites"]] == [layer for layer in layers for _ in range(17)]


def test_report_is_written_for_people_and_programs(
    golden: Path, failing: Path, failure: click.testing.Result, command: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "reports" / "today"
    result = command(mm2_compare, "--golden", golden, "--run", failing, "--report-path", folder, "--quiet")
    assert result.exit_code == 1
    names = {"report.md", "report.txt", "junit.xml", "comparison_report.json"}
    names |= {"comparison_summary.json", "comparison.csv"}
    assert {path.name for path in folder.iterdir()} - {"report.html"} == names
    assert all(f"written: {folder / name}" in result.stdout for name in names)
    report = json.loads((folder / "comparison_report.json").read_text(encoding="utf-8"))
    assert report == read_record(failure)
    with (folder / "comparison.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["site"] for row in rows if row["status"] == "fail"] == ["moe_delta"]


@pytest.fixture(scope="module")
def captures(shared_copyist: Any) -> Path:
    """A golden, an older device run that passes, and a newer one that does not."""
    shared_copyist.golden(name="captures/gpu_reference/full_model")
    old = shared_copyist.device_run(name="captures/neuron/sweep_0_to_3")
    os.utime(old / "manifest.json", (1, 1))
    shared_copyist.device_run({(2, Site.MOE_DELTA): halved}, name="captures/neuron/single_layer_2")
    folder: Path = shared_copyist.folder / "captures"
    return folder


class TestNewestCaptures:
    def test_newest_of_both_sides_are_compared(self, captures: Path, command: Any, monkeypatch: Any) -> None:
        monkeypatch.setenv("MM2_CAPTURES", str(captures))
        result = command(mm2_compare, "--layer-pattern", "layer_*", "--json", "--quiet")
        record = read_record(result)
        assert (result.exit_code, record["blame"][0]["layer"]) == (1, 2)
        assert record["reference"] == str(captures / "gpu_reference" / "full_model")
        assert record["target"] == str(captures / "neuron" / "single_layer_2")

    def test_named_capture_wins_over_the_newest(self, captures: Path, command: Command) -> None:
        old = captures / "neuron" / "sweep_0_to_3"
        result = command(
            mm2_compare, "--captures", captures, "--run", old, "--layer", "2", "--json", "--quiet"
        )
        assert (result.exit_code, read_record(result)["target"]) == (0, str(old))

    def test_folder_without_captures_says_how_to_make_one(self, command: Command, tmp_path: Path) -> None:
        result = command(mm2_compare, "--captures", tmp_path)
        assert result.exit_code == 3
        assert f"no capture under {tmp_path / 'gpu_reference'}" in result.stderr
        assert "mm2-gpu extract-all" in result.stderr
        assert "or name one with --golden" in result.stderr


def test_help_begins_with_a_verb_and_ends_with_an_example(command: Command) -> None:
    result = command(mm2_compare, "--help")
    assert result.exit_code == 0
    assert "\n  Judge a port's run against a golden" in result.stdout
    assert "\n  Example: mm2-compare --layer-pattern 'layer_*'\n" in result.stdout


class TestNamesOfTheSides:
    """The owner's --gpu-path and --neuron-path are second names of --golden and --run."""

    def test_second_names_judge_the_same_and_the_last_given_counts(
        self, command: Any, golden: Path, failing: Path, failure: click.testing.Result, tmp_path: Path
    ) -> None:
        sides = ("--golden", tmp_path / "gone", "--gpu-path", golden, "--neuron-path", failing)
        result = command(mm2_compare, *sides, "--json", "--quiet")
        assert (result.exit_code, result.stdout) == (failure.exit_code, failure.stdout)

    def test_errors_say_the_first_names(self, command: Any, tmp_path: Path) -> None:
        for old, new in (("--gpu-map", "--golden-map"), ("--neuron-map", "--run-map")):
            result = command(mm2_compare, old, tmp_path / "gone.yaml")
            assert result.exit_code == 2
            assert f"Invalid value for '{new}'" in result.stderr
            assert old not in result.stderr


class TestSummary:
    """`--json=summary`: the small form."""

    def test_summary_holds_coverage_limits_and_causes(
        self, command: Command, golden: Path, failing: Path, failure: click.testing.Result
    ) -> None:
        result = command(mm2_compare, "--golden", golden, "--run", failing, "--quiet", "--json=summary")
        record, whole = read_record(result), read_record(failure)
        assert (result.exit_code, record["verdict"], record["schema_version"]) == (1, "fail", 2)
        coverage = {"compared": 68, "of": 68, "layers": [0, 1, 2, 3], "not_compared": []}
        assert record["coverage"].items() >= coverage.items()
        worst = record["limits"][0]
        assert (worst["layer"], worst["site"], worst["status"]) == (2, "moe_delta", "fail")
        assert worst["value"] > worst["limit"]
        (cause,) = record["cause"]
        assert (cause["layers"], cause["sites"], cause["severity"]) == ([2], ["moe_delta"], "fail")
        assert record["next"]
        assert len(result.stdout) < len(failure.stdout) / 5
        own = {"coverage", "limits", "cause", "statuses", "worst"}
        assert set(record) - own == set(whole) - {"sites"}

    def test_summary_of_a_pass_names_no_cause(self, passing: Path, compare: Any) -> None:
        _, record = compare(passing, None, "--json=summary")
        assert (record["verdict"], record["cause"]) == ("pass", [])
        assert all(limit["value"] < limit["limit"] for limit in record["limits"])

    def test_place_is_told_as_numbers_too(self, copyist: Any, compare: Any) -> None:
        def spoilt(tensor: torch.Tensor) -> torch.Tensor:
            tensor[..., 64:128] *= 2  # head 1 of the toy's, whose heads have 64 dims
            return tensor

        _, record = compare(copyist.device_run({(1, Site.Q_PROJ): spoilt}), None, "--json=summary")
        (cause,) = record["cause"]
        assert cause["sites"] == ["q_proj"]
        assert any("of head 1" in sentence for sentence in cause["where"])
        (region,) = [region for region in cause["regions"] if region["heads"]]
        assert region["heads"] == [1]
        assert region["num_wrong"] == region["num_held"] == 64


def test_page_that_needs_a_package_is_told_on_stderr(
    golden: Path, runs: Any, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    sides = ("--gpu-path", golden, "--neuron-path", runs["right"].directory, "--layer", "0", "--quiet")
    result = command(mm2_compare, *sides, "--json", "--report-path", tmp_path / "report")
    assert "report.html, whose charts need a package: pip install 'vl-convert-python>=1.9'" in result.stderr
    assert json.loads(result.stdout)["next"] is not None
    assert (tmp_path / "report" / "junit.xml").exists()


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_verdict_is_printed_though_its_report_cannot_be_written(
    golden: Path, runs: dict[str, Capture], command: Any, tmp_path: Path, form: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("no folder")
    sides = ("--golden", golden, "--run", runs["swapped"].directory, "--layer", "1", "--quiet", *form)
    result = command(mm2_compare, *sides, "--report-path", tmp_path / "file" / "report")
    assert result.exit_code == 3
    assert "cannot write the report" in result.stderr
    assert json.loads(result.stdout)["verdict"] == "fail" if form else result.stdout.startswith("FAIL: ")


def test_diagnosis_stands_in_its_report(
    golden: Path, runs: dict[str, Capture], toy: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    sides = ("--gpu-path", golden, "--neuron-path", runs["swapped"].directory, "--model", toy, "--quiet")
    options = ("--mistake", "gate_up_swapped", "--report-path", tmp_path / "report")
    result = command(mm2_diagnose, *sides, *options)
    assert result.exit_code == 1
    assert f"written: {tmp_path / 'report' / 'report.md'}" in result.stdout
    markdown = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "- layer 1: matches gate\\_up\\_swapped: leaves ρ" in markdown
    assert "  - Gate and up are exchanged: w3 is activated, and w1 is not. Look at " in markdown
    text = (tmp_path / "report" / "report.txt").read_text(encoding="utf-8")
    assert text.startswith("FAIL: ")
    assert "Layer 1 matches gate_up_swapped" in text
    record = json.loads((tmp_path / "report" / "comparison_report.json").read_text(encoding="utf-8"))
    assert record["verdict"] == "fail"
    assert record["next"][0].endswith("--prove")
