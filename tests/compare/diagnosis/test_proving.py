"""`mm2-diagnose --prove`: the port of a run is run again, in a process of its own, with its mistake undone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest

from compare.catalogue.undo import Undo
from compare.comparer import compare_captures
from compare.diagnosis.cli import main as mm2_diagnose
from compare.diagnosis.proof import MistakeProof
from compare.diagnosis.proving import RecomputedProofs
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.reader import Capture
from minimax_tools.dumps.opening import DumpReading, open_sides
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Prove = Callable[..., dict[str, Any]]

TESTS = Path(__file__).parents[2]
REPOSITORY = TESTS.parent
PORTS = TESTS / "ports"
# A port of which some layers are wrong, in which lines can be pasted.
PORT = """
import sys
sys.path.insert(0, {ports!r})
import planted
import torch

class Port(planted.SwappedKeyValue):
    def convert_state_dict(self, tensors, config, layer_idx):
{lines}
        if layer_idx not in {wrong}:
            return planted.port.DecoderLayer.convert_state_dict(self, tensors, config, layer_idx)
        return super().convert_state_dict(tensors, config, layer_idx)
"""


def write_port(path: Path, lines: list[str], *, wrong: tuple[int, ...] = (1, 2)) -> str:
    text = PORT.format(ports=str(PORTS), wrong=wrong, lines="\n".join(f"        {line}" for line in lines))
    path.write_text(text)
    return f"{path}:Port"


@pytest.fixture(autouse=True)
def on_this_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the port imports the packages that are tested here."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(REPOSITORY), os.environ.get("PYTHONPATH", ""))))


@pytest.fixture
def run(toy: Path, golden: Path, command: Command, tmp_path: Path) -> Callable[..., Path]:
    """Runs layers of a port: `run(COMMAND, TARGET, *OPTIONS)` gives the capture."""

    def run_layers(name: str, target: str, *options: object) -> Path:
        directory = tmp_path / "run"
        arguments = (name, "--model", toy, "--golden", golden, "--target", target, "--backend", "cpu")
        command(mm2_test, *arguments, *options, "--output-dir", directory, "--quiet")
        return directory

    return run_layers


@pytest.fixture
def prove(toy: Path, golden: Path, command: Command) -> Prove:
    """Diagnoses a run with --prove: `prove(RUN, *OPTIONS)` gives the JSON record."""

    def diagnose(directory: Path, *options: object) -> dict[str, Any]:
        paths = ("--model", toy, "--golden", golden, "--run", directory)
        result = command(mm2_diagnose, *paths, "--prove", *options, "--json", "--quiet")
        record: dict[str, Any] = json.loads(result.stdout)
        return record

    return diagnose


@pytest.mark.parametrize(
    ("wrong", "matching", "place", "first_line"),
    [
        ((1,), "Layer 1 matches", "", "if layer_idx == 1:"),
        # Each layer is proved by a process of its own.
        pytest.param(
            (1, 2), "Layers 1-2 match", "Layers 1-2: ", "if layer_idx in (1, 2):", marks=pytest.mark.slow
        ),
    ],
)
def test_pasted_lines_make_the_port_right(
    wrong: tuple[int, ...],
    matching: str,
    place: str,
    first_line: str,
    toy: Path,
    golden: Path,
    run: Callable[..., Path],
    command: Command,
    tmp_path: Path,
) -> None:
    # The last layer is right, and stays so.
    target, layers = write_port(tmp_path / "port.py", [], wrong=wrong), ("--layers", f"1:{wrong[-1] + 2}")
    directory = run("sweep", target, *layers)
    paths = ("--model", toy, "--golden", golden, "--run", directory)
    result = command(mm2_diagnose, *paths, "--mistake", "k_v_swapped", "--prove", "--quiet")
    assert result.exit_code == 1
    assert f"{matching} k_v_swapped" in result.stdout
    assert f"{place}Proved: with the weights changed before the port converts them" in result.stdout
    _, _, behind = result.stdout.partition("at the beginning of convert_state_dict:\n")
    lines = [line[6:] for line in behind.splitlines() if line.startswith("      ")]
    assert lines[0] == first_line

    write_port(tmp_path / "port.py", lines, wrong=wrong)
    arguments = ("sweep", "--model", toy, "--golden", golden, "--target", target, "--backend", "cpu", *layers)
    assert command(mm2_test, *arguments, "--output-dir", tmp_path / "again", "--quiet").exit_code == 0


@pytest.mark.slow
def test_each_finding_has_its_proof(run: Callable[..., Path], prove: Prove) -> None:
    directory = run("multi-layer", f"{PORTS / 'one_wrong_layer.py'}:SoftmaxRouter_at_2", "--layers", "1:4")
    record = prove(directory)
    (found,) = record["diagnosis"]
    assert (found["layer"], found["mistake"], found["proof"]["outcome"]) == (2, "router_softmax", "proved")
    assert found["proof"]["way"] == "stage"


def test_without_the_option_nothing_is_proved(
    toy: Path, golden: Path, run: Callable[..., Path], command: Command
) -> None:
    directory = run("single-layer", f"{PORTS / 'planted.py'}:SwappedGateUp", "--layer", 1)
    paths = ("--model", toy, "--golden", golden, "--run", directory)
    result = command(mm2_diagnose, *paths, "--mistake", "gate_up_swapped", "--json", "--quiet")
    assert "proof" not in json.loads(result.stdout)["diagnosis"][0]


def test_wrong_name_that_is_forced_gets_no_proof(run: Callable[..., Path], prove: Prove) -> None:
    directory = run("single-layer", f"{PORTS / 'planted.py'}:SwappedGateUp", "--layer", 1)
    record = prove(directory, "--mistake", "gelu_activation")
    assert record["diagnosis"] == []
    assert not any("proof" in found for found in record["layers"][0]["nearest"])


@pytest.mark.slow
def test_port_of_several_ranks_is_run_on_as_many(run: Callable[..., Path], prove: Prove) -> None:
    port = f"{REPOSITORY / 'scripts' / 'examples' / 'swapped_device_layer.py'}:SwappedDeviceLayer"
    directory = run("single-layer", port, "--layer", 1)
    several = directory.with_name("several")
    shutil.copytree(directory, several)
    manifest = json.loads((several / "manifest.json").read_text())
    options = {"tp_degree": 2, "ep_degree": 1, "reduce_dtype": "float32"}
    manifest["provenance"]["options"] |= options
    (several / "manifest.json").write_text(json.dumps(manifest))
    record = prove(several, "--mistake", "gate_up_swapped")
    assert record["diagnosis"][0]["proof"]["outcome"] == "proved"


@pytest.mark.slow
def test_port_that_lies_elsewhere_and_has_changed_is_named_and_noted(
    run: Callable[..., Path], prove: Prove, tmp_path: Path
) -> None:
    directory = run("single-layer", write_port(tmp_path / "port.py", []), "--layer", 1)
    (tmp_path / "port.py").unlink()
    (found,) = prove(directory, "--mistake", "k_v_swapped")["diagnosis"]
    assert found["proof"]["outcome"] == "not provable"
    assert "the port did not run" in found["proof"]["reason"]
    assert "port.py" in found["proof"]["reason"]

    moved = write_port(tmp_path / "moved.py", ["# mended"])
    record = prove(directory, "--mistake", "k_v_swapped", "--target", moved)
    assert record["diagnosis"][0]["proof"]["outcome"] == "proved"
    assert any("has changed since the run" in note for note in record["notes"])


def test_decoded_tokens_alone_are_not_provable(run: Callable[..., Path], prove: Prove) -> None:
    options = ("--layer", 1, "--decode", 4)
    directory = run("single-layer", f"{PORTS / 'diagnosed.py'}:SwappedWhereDecoded", *options)
    (found,) = prove(directory, "--mistake", "gate_up_swapped")["diagnosis"]
    assert found["parameters"] == {"rows": "decode"}
    assert found["proof"]["outcome"] == "not provable"
    assert "only decoded tokens are wrong" in found["proof"]["reason"]


def test_factor_of_a_hidden_sum_is_not_provable(run: Callable[..., Path], prove: Prove) -> None:
    directory = run("single-layer", f"{PORTS / 'diagnosed.py'}:BlackBoxOfSmallExperts", "--layer", 1)
    (found,) = prove(directory, "--mistake", "moe_delta_scaled")["diagnosis"]
    assert found["parameters"]["factor"] == pytest.approx(0.97, rel=0.005)
    assert found["proof"]["outcome"] == "not provable"
    assert "the scaled sum itself is not shown" in found["proof"]["reason"]


class TestDump:
    """Dumps name no port: they prove by what they show."""

    @pytest.mark.parametrize(
        ("port", "mistake"),
        [
            ("SwappedGateUp", "gate_up_swapped"),
            pytest.param("TiledKeyValueHeads", "kv_repeat_tiled", marks=pytest.mark.slow),
        ],
    )
    def test_dump_proves_by_its_own_sites(
        self, run: Callable[..., Path], prove: Prove, dumps: Any, tmp_path: Path, port: str, mistake: str
    ) -> None:
        directory = run("full", f"{PORTS / 'one_wrong_layer.py'}:{port}_at_1", "--sites", "all")
        dumps.write_nxdi(tmp_path / "dump", Capture.open(directory))
        (found,) = prove(tmp_path / "dump", "--mistake", mistake)["diagnosis"]
        proof = found["proof"]
        assert (found["layer"], proof["outcome"], proof["way"]) == (1, "proved", "recomputed")
        assert proof["stage"]["leaves"] < 2 < proof["stage"]["unexplained"]

    def test_what_the_dump_does_not_show_is_said(
        self, runs: Any, prove: Prove, dumps: Any, tmp_path: Path
    ) -> None:
        dumps.write_nxdi(tmp_path / "dump", runs["swapped"])
        for file in (tmp_path / "dump").glob("*layers.1.mlp_output*"):
            file.unlink()
        (found,) = prove(tmp_path / "dump", "--mistake", "gate_up_swapped")["diagnosis"]
        proof = found["proof"]
        assert proof["outcome"] == "not provable"
        assert "there is no port to run, and the dump does not show moe_delta" in proof["reason"]
        assert "mm2-test" in proof["next_step"]

    def test_second_mistake_is_not_hidden(
        self, toy: Path, golden: Path, run: Callable[..., Path], dumps: Any, tmp_path: Path
    ) -> None:
        target = f"{PORTS / 'one_wrong_layer.py'}:NormPerRankAndSwappedGateUp_at_1"
        dumps.write_nxdi(tmp_path / "dump", Capture.open(run("full", target, "--sites", "all")))
        proofs = open_proofs(toy, golden, tmp_path / "dump")
        norm, experts = Undo("qk_norm_per_rank", (("tp_degree", 2),)), Undo("gate_up_swapped")
        assert proofs.prove(1, (norm, experts)).is_proved
        for alone in (norm, experts):
            proof: MistakeProof = proofs.prove(1, (alone,))
            assert proof.outcome == "not proved"
            assert "is wrong too" in proof.reason


def open_proofs(toy: Path, golden: Path, dump: Path) -> RecomputedProofs:
    reference, target = open_sides(
        golden, dump, reference_reading=DumpReading(), target_reading=DumpReading()
    )
    weights = CheckpointWeights(model=str(toy))
    comparison = compare_captures(
        reference,
        target,
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        layer_pattern="layer_*",
        weights=weights,
    )
    return RecomputedProofs(golden=reference, dump=target, comparison=comparison, weights=weights)
