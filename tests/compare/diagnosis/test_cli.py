"""The output of `mm2-diagnose`, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.diagnosis.cli import main as mm2_diagnose
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]

REPOSITORY = Path(__file__).parents[3]
PLANTED = Path(__file__).parents[2] / "ports" / "planted.py"


@pytest.fixture(scope="module")
def swapped(toy: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of layer 1 with gate and up swapped."""
    folder = tmp_path_factory.mktemp("run") / "swapped"
    arguments = ["single-layer", "--layer", "1", "--model", str(toy), "--golden", str(golden)]
    arguments += ["--target", f"{PLANTED}:SwappedGateUp", "--backend", "cpu", "--output-dir", str(folder)]
    assert click.testing.CliRunner().invoke(mm2_test, [*arguments, "--quiet"]).exit_code == 1
    return folder


def test_text_names_the_mistake_and_where_to_look(
    toy: Path, golden: Path, swapped: Path, command: Command
) -> None:
    result = command(mm2_diagnose, "--model", toy, "--golden", golden, "--run", swapped)
    assert result.exit_code == 1
    assert "Layer 1 matches gate_up_swapped: leaves ρ" in result.stdout
    assert "Look at the order of w1 and w3 in the fused weight." in result.stdout
    assert "Trying" in result.stderr


def test_layers_like_two_that_nothing_explains_are_passed_over_unless_chosen(
    toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    run = ["sweep", "--model", toy, "--golden", golden, "--backend", "cpu", "--quiet"]
    command(mm2_test, *run, "--target", f"{PLANTED}:SwappedGateUp", "--output-dir", tmp_path / "run")
    paths = ("--model", toy, "--gpu-path", golden, "--neuron-path", tmp_path / "run", "--json", "--quiet")
    wrong = ("--mistake", "gelu_activation")
    record = json.loads(command(mm2_diagnose, *paths, *wrong).stdout)
    layers = [one["layer"] for one in record["layers"]]
    assert (record["verdict"], layers) == ("fail", [0, 1])
    (passed,) = record["passed_over"]
    assert passed["like"] == [0, 1]
    assert passed["layers"][0] == 2
    record = json.loads(command(mm2_diagnose, *paths, *wrong, "--layer-pattern", "layer_*").stdout)
    assert [one["layer"] for one in record["layers"]] == [*layers, *passed["layers"]]
    # Where a mistake is named, every layer is diagnosed.
    record = json.loads(command(mm2_diagnose, *paths, "--mistake", "gate_up_swapped").stdout)
    assert [one["layer"] for one in record["diagnosis"]] == [*layers, *passed["layers"]]


def test_nothing_is_proved_or_searched_again_where_nothing_was_named(
    toy: Path, golden: Path, swapped: Path, command: Command
) -> None:
    paths = ("--model", toy, "--gpu-path", golden, "--neuron-path", swapped)
    asked = (*paths, "--mistake", "gelu_activation")
    first = command(mm2_diagnose, *asked, "--prove")
    assert "Nothing to prove: no mistake was named." in first.stdout
    again = command(mm2_diagnose, *asked, "--prove")
    assert again.exit_code == 1
    assert again.stdout.startswith("FAIL: layer 1, moe_delta: no known mistake explains it\nNothing to prove")
    assert "Trying" not in again.stderr
    # Another question is answered by a search.
    assert "Trying" in command(mm2_diagnose, *paths, "--mistake", "relu_activation", "--prove").stderr


def test_diagnosis_that_was_kept_serves_proofs_alone_and_no_report(
    toy: Path, golden: Path, swapped: Path, command: Command, tmp_path: Path
) -> None:
    asked = ("--model", toy, "--golden", golden, "--run", swapped, "--mistake", "gate_up_interleaved")
    assert "Trying" in command(mm2_diagnose, *asked).stderr
    assert "Trying" in command(mm2_diagnose, *asked).stderr
    # A report draws the comparison, which is not kept.
    command(mm2_diagnose, *asked, "--prove", "--report-path", tmp_path)
    assert (tmp_path / "report.md").is_file()


def test_a_port_that_changed_since_the_run_is_noted(
    toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    port = tmp_path / "port.py"
    example = REPOSITORY / "scripts" / "examples" / "minimal_port.py"
    wrong = example.read_text().replace("functional.silu", "functional.relu")
    port.write_text(wrong)
    run = ["single-layer", "--layer", "1", "--model", toy, "--golden", golden, "--backend", "cpu", "--quiet"]
    command(mm2_test, *run, "--target", f"{port}:DecoderLayer", "--output-dir", tmp_path / "run")
    paths = ("--model", toy, "--gpu-path", golden, "--neuron-path", tmp_path / "run", "--quiet")
    asked = (*paths, "--mistake", "relu_activation")
    assert "has changed since the run" not in command(mm2_diagnose, *asked).stdout
    port.touch()
    assert "has changed since the run" not in command(mm2_diagnose, *asked).stdout
    port.write_text(f"{wrong}\n# mended\n")
    assert "has changed since the run: the diagnosis is of the port as it was" in " ".join(
        command(mm2_diagnose, *asked).stdout.split()
    )


def test_catalogue_is_listed_without_a_model(command: Command) -> None:
    result = command(mm2_diagnose, "--list")
    assert result.exit_code == 0
    assert "gate_up_swapped" in result.stdout
    record = json.loads(command(mm2_diagnose, "--list", "--json").stdout)
    assert {"mistake", "what", "look_at", "sources"} == set(record["mistakes"][0])


def test_model_must_be_named(golden: Path, swapped: Path, command: Command) -> None:
    result = command(mm2_diagnose, "--golden", golden, "--run", swapped)
    assert result.exit_code == 2
    assert "no checkpoint was named" in result.output


def test_mistake_must_be_in_the_catalogue(toy: Path, golden: Path, swapped: Path, command: Command) -> None:
    paths = ("--model", toy, "--golden", golden, "--run", swapped)
    result = command(mm2_diagnose, *paths, "--mistake", "final_norm_mising")
    assert result.exit_code == 2
    assert "Did you mean final_norm_missing" in result.output


def test_checkpoint_of_another_model_is_refused(
    golden: Path, swapped: Path, command: Command, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    synthesize(other, model=SyntheticModel(), dtype=torch.float8_e4m3fn, shard_size_bytes=4_000_000, seed=1)
    result = command(mm2_diagnose, "--model", other, "--golden", golden, "--run", swapped)
    assert result.exit_code == 3
    assert f"is not of the checkpoint {other}" in " ".join(result.output.split())


def test_of_a_hubs_model_each_layer_that_is_judged_is_fetched(
    toy: Path, golden: Path, hub: Any, command: Command, tmp_path: Path, forked_python: Any
) -> None:
    # A chained run: each layer is judged on the port's own input, which takes its weights.
    arguments = ("full", "--model", toy, "--golden", golden, "--target", f"{PLANTED}:SwappedGateUp")
    command(mm2_test, *arguments, "--backend", "cpu", "--output-dir", tmp_path / "run", "--quiet")
    hub.add("owner/toy", toy)
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    options = ("--layer-pattern", "layer_[01]", "--mistake", "gate_up_swapped", "--json", "--quiet")
    paths = ("--model", "owner/toy", "--golden", golden, "--run", tmp_path / "run")
    program = "from compare.diagnosis.__main__ import main; main()"
    done = forked_python(program, *paths, *options, folder=tmp_path, **environment)
    assert done.returncode == 1, done.stderr
    named = [(finding["layer"], finding["mistake"]) for finding in json.loads(done.stdout)["diagnosis"]]
    assert named == [(0, "gate_up_swapped"), (1, "gate_up_swapped")]


def test_layer_that_was_handed_an_error_is_judged_on_its_own_input(
    toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    arguments = ["multi-layer", "--layers", "0:2", "--model", toy, "--golden", golden, "--backend", "cpu"]
    target = f"{PLANTED}:SwappedGateUp"
    command(mm2_test, *arguments, "--target", target, "--output-dir", tmp_path / "run", "--quiet")
    paths = ("--model", toy, "--golden", golden, "--run", tmp_path / "run", "--json", "--quiet")
    result = command(mm2_diagnose, *paths, "--layer", "1", "--mistake", "gate_up_swapped")
    assert result.exit_code == 1
    (finding,) = json.loads(result.stdout)["diagnosis"]
    assert (finding["layer"], finding["mistake"]) == (1, "gate_up_swapped")
    # The comparison blames nothing behind layer 0; that nothing explains the layer is a failure all the same.
    result = command(mm2_diagnose, *paths, "--layer", "1", "--mistake", "norm_eps")
    assert (result.exit_code, json.loads(result.stdout)["diagnosis"]) == (1, [])


def test_checkpoint_without_fp8_says_what_was_not_tried(
    golden: Path, swapped: Path, command: Command, tmp_path: Path
) -> None:
    copy = tmp_path / "bfloat16"
    synthesize(copy, model=SyntheticModel(), dtype=torch.bfloat16, shard_size_bytes=4_000_000, seed=0)
    paths = ("--model", copy, "--golden", golden, "--run", swapped)
    record = json.loads(command(mm2_diagnose, *paths, "--mistake", "gate_up_swapped", "--json").stdout)
    assert record["layers"][0]["notes"] == [
        "the checkpoint stores no FP8 weights: mistakes of FP8 codes and scales were not tried"
    ]


def test_a_mistake_without_a_name_is_given_its_place(
    toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    run = ["sweep", "--layers", "1:2", "--model", toy, "--golden", golden, "--backend", "cpu", "--quiet"]
    target = f"{PLANTED}:LaterRowsDouble"
    assert command(mm2_test, *run, "--target", target, "--output-dir", tmp_path / "run").exit_code == 1
    paths = ("--model", toy, "--golden", golden, "--run", tmp_path / "run")
    result = command(mm2_diagnose, *paths, "--mistake", "gelu_activation", "--quiet")
    assert "moe_delta: wrong tokens: all 33 in row 1; the 48 others are right" in " ".join(
        result.stdout.split()
    )
