"""The output of `mm2-diagnose`, the diagnosis that it keeps beside the run, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.diagnosis.cli import main as mm2_diagnose
from compare.diagnosis.finding import Diagnosis
from compare.diagnosis.kept_diagnosis import KeptDiagnosis, digest_question
from minimax_tools.capture.reader import Capture
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

Command = Callable[..., click.testing.Result]
RunPort = Callable[..., Path]
Diagnose = Callable[..., click.testing.Result]

REPOSITORY = Path(__file__).parents[3]
SWAPPED = "planted.py:SwappedGateUp"


@pytest.fixture
def swapped(run_port: RunPort) -> Path:
    """A run of layer 1 with gate and up swapped."""
    return run_port("single-layer", SWAPPED, "--layer", 1)


@pytest.fixture
def chained(run_port: RunPort) -> Path:
    """A chained run of two layers with gate and up swapped: each is judged on the port's own input."""
    return run_port("multi-layer", SWAPPED, "--layers", "0:2")


@pytest.fixture
def diagnose(toy: Path, golden: Path, command: Command) -> Diagnose:
    """Runs the command on a run, with the mistake that alone is tried."""

    def run(target: Path, mistake: str, *options: object, model: Path = toy) -> click.testing.Result:
        paths = ("--model", model, "--golden", golden, "--run", target)
        return command(mm2_diagnose, *paths, "--mistake", mistake, *options)

    return run


def record_of(result: click.testing.Result) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def named(record: dict[str, Any]) -> list[tuple[int, str]]:
    return [(finding["layer"], finding["mistake"]) for finding in record["diagnosis"]]


def words_of(result: click.testing.Result) -> str:
    return " ".join(result.output.split())


def test_text_names_the_mistake_and_where_to_look(
    toy: Path, golden: Path, swapped: Path, command: Command
) -> None:
    # Among all of the catalogue.
    result = command(mm2_diagnose, "--model", toy, "--golden", golden, "--run", swapped)
    assert result.exit_code == 1
    assert "Layer 1 matches gate_up_swapped: leaves ρ" in result.stdout
    assert "Look at the order of w1 and w3 in the fused weight." in result.stdout
    assert "Trying" in result.stderr


def test_layers_like_two_that_nothing_explains_are_passed_over_unless_chosen(
    run_port: RunPort, diagnose: Diagnose
) -> None:
    run = run_port("sweep", SWAPPED, "--layers", "0:3")
    record = record_of(diagnose(run, "gelu_activation", "--json"))
    assert (record["verdict"], [one["layer"] for one in record["layers"]]) == ("fail", [0, 1])
    (passed,) = record["passed_over"]
    assert (passed["like"], passed["layers"]) == ([0, 1], [2])
    record = record_of(diagnose(run, "gelu_activation", "--layer-pattern", "layer_*", "--json"))
    assert [one["layer"] for one in record["layers"]] == [0, 1, 2]
    # Where a mistake is named, every layer is diagnosed.
    record = record_of(diagnose(run, "gate_up_swapped", "--json"))
    assert [layer for layer, _ in named(record)] == [0, 1, 2]


def test_layer_that_was_handed_an_error_is_judged_on_its_own_input(chained: Path, diagnose: Diagnose) -> None:
    result = diagnose(chained, "gate_up_swapped", "--layer", "1", "--json")
    assert (result.exit_code, named(record_of(result))) == (1, [(1, "gate_up_swapped")])
    # The comparison blames nothing behind layer 0; that nothing explains the layer is a failure all the same.
    result = diagnose(chained, "norm_eps", "--layer", "1", "--json")
    assert (result.exit_code, named(record_of(result))) == (1, [])


def test_of_a_hubs_model_each_layer_that_is_judged_is_fetched(
    toy: Path, golden: Path, chained: Path, hub: Any, tmp_path: Path, forked_python: Any
) -> None:
    hub.add("owner/toy", toy)
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    options = ("--layer-pattern", "layer_[01]", "--mistake", "gate_up_swapped", "--json", "--quiet")
    paths = ("--model", "owner/toy", "--golden", golden, "--run", chained)
    program = "from compare.diagnosis.__main__ import main; main()"
    done = forked_python(program, *paths, *options, folder=tmp_path, **environment)
    assert done.returncode == 1, done.stderr
    assert named(json.loads(done.stdout)) == [(0, "gate_up_swapped"), (1, "gate_up_swapped")]


def test_a_port_that_changed_since_the_run_is_noted(
    run_port: RunPort, diagnose: Diagnose, tmp_path: Path
) -> None:
    port = tmp_path / "port.py"
    example = REPOSITORY / "scripts" / "examples" / "minimal_port.py"
    wrong = example.read_text().replace("functional.silu", "functional.relu")
    port.write_text(wrong)
    run = run_port("single-layer", f"{port}:DecoderLayer", "--layer", 1)
    port.touch()
    assert "has changed since the run" not in diagnose(run, "relu_activation").stdout
    port.write_text(f"{wrong}\n# mended\n")
    found = words_of(diagnose(run, "relu_activation"))
    assert "has changed since the run: the diagnosis is of the port as it was" in found


def test_checkpoint_without_fp8_says_what_was_not_tried(
    swapped: Path, diagnose: Diagnose, tmp_path: Path
) -> None:
    copy = tmp_path / "bfloat16"
    synthesize(copy, model=SyntheticModel(), dtype=torch.bfloat16, shard_size_bytes=4_000_000, seed=0)
    record = record_of(diagnose(swapped, "gate_up_swapped", "--json", model=copy))
    assert record["layers"][0]["notes"] == [
        "the checkpoint stores no FP8 weights: mistakes of FP8 codes and scales were not tried"
    ]
    # Nobody asked for a proof.
    assert "proof" not in record["diagnosis"][0]


def test_a_mistake_without_a_name_is_given_its_place(run_port: RunPort, diagnose: Diagnose) -> None:
    run = run_port("sweep", "planted.py:LaterRowsDouble", "--layers", "1:2")
    found = words_of(diagnose(run, "gelu_activation"))
    assert "moe_delta: wrong tokens: all 33 in row 1; the 48 others are right" in found


def test_catalogue_is_listed_without_a_model(command: Command) -> None:
    result = command(mm2_diagnose, "--list")
    assert result.exit_code == 0
    assert "gate_up_swapped" in result.stdout
    record = json.loads(command(mm2_diagnose, "--list", "--json").stdout)
    assert {"mistake", "what", "look_at", "sources", "models"} == set(record["mistakes"][0])


class TestKeptDiagnosis:
    """The diagnosis beside the run answers its own question alone."""

    def test_nothing_is_proved_or_searched_again_where_nothing_was_named(
        self, swapped: Path, diagnose: Diagnose
    ) -> None:
        first = diagnose(swapped, "gelu_activation", "--prove")
        assert "Nothing to prove: no mistake was named." in first.stdout
        again = diagnose(swapped, "gelu_activation", "--prove")
        assert again.exit_code == 1
        unexplained = "FAIL: layer 1, moe_delta: no known mistake explains it\nNothing to prove"
        assert again.stdout.startswith(unexplained)
        assert "Trying" not in again.stderr
        # Another question is answered by a search.
        assert "Trying" in diagnose(swapped, "relu_activation", "--prove").stderr

    def test_serves_proofs_alone_and_no_report(
        self, swapped: Path, diagnose: Diagnose, tmp_path: Path
    ) -> None:
        for _ in range(2):
            assert "Trying" in diagnose(swapped, "gate_up_interleaved").stderr
        # A report draws the comparison, which is not kept.
        diagnose(swapped, "gate_up_interleaved", "--prove", "--report-path", tmp_path)
        assert (tmp_path / "report.md").is_file()

    def test_question_is_of_captures_model_layers_and_mistakes(self, golden: Path, tmp_path: Path) -> None:
        class Foreign(Capture):
            """A capture of another tool."""

            @property
            def known_description(self) -> None:  # type: ignore[override]
                return None

        capture = Capture.open(golden)
        foreign = Foreign(golden, capture.manifest)

        def ask(reference: Capture = capture, run: Capture = capture, **parts: Any) -> str | None:
            return digest_question(
                reference, run, **{"model": "toy", "layers": None, "mistakes": (), **parts}
            )

        others = [ask(model="other"), ask(layers=(1,)), ask(mistakes=("norm_eps",))]
        assert None not in {ask(), *others}
        assert len({ask(), *others}) == 4
        assert (ask(foreign, capture), ask(capture, foreign)) == (None, None)

    def test_folder_that_cannot_be_read_or_written_keeps_none(self, tmp_path: Path) -> None:
        found = Diagnosis(reference="golden", target="run", is_failed=True, layers=(), notes=("a note",))
        kept = KeptDiagnosis(question="question", diagnosis=found)
        kept.keep(tmp_path / "missing")
        assert KeptDiagnosis.find(tmp_path / "missing", "question") is None
        kept.keep(tmp_path)
        assert KeptDiagnosis.find(tmp_path, "question") == found
        assert KeptDiagnosis.find(tmp_path, "another") is None
        (tmp_path / "diagnosis.json").write_text("{}")
        assert KeptDiagnosis.find(tmp_path, "question") is None


def test_refusals(toy: Path, golden: Path, swapped: Path, command: Command, tmp_path: Path) -> None:
    other = tmp_path / "other"
    synthesize(other, model=SyntheticModel(), dtype=torch.float8_e4m3fn, shard_size_bytes=4_000_000, seed=1)
    for exit_code, message, options in (
        (2, "no checkpoint was named", ()),
        (2, "Did you mean final_norm_missing", ("--model", toy, "--mistake", "final_norm_mising")),
        (3, f"is not of the checkpoint {other}", ("--model", other)),
    ):
        result = command(mm2_diagnose, "--golden", golden, "--run", swapped, *options)
        assert result.exit_code == exit_code
        assert message in words_of(result)
