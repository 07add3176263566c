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
from compare.diagnosis.proving import RecomputedProofs
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.reader import Capture
from minimax_tools.dumps.opening import DumpReading, open_sides
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Prove = Callable[..., dict[str, Any]]
RunPort = Callable[..., Path]

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
def prove(toy: Path, golden: Path, command: Command) -> Prove:
    """Diagnoses a run with --prove: `prove(RUN, *OPTIONS)` gives the JSON record."""

    def diagnose(directory: Path, *options: object) -> dict[str, Any]:
        paths = ("--model", toy, "--golden", golden, "--run", directory)
        result = command(mm2_diagnose, *paths, "--prove", *options, "--json", "--quiet")
        record: dict[str, Any] = json.loads(result.stdout)
        return record

    return diagnose


@pytest.mark.parametrize("wrong", [(1,), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_pasted_lines_make_the_port_right(
    wrong: tuple[int, ...],
    toy: Path,
    golden: Path,
    run_port: RunPort,
    command: Command,
    tmp_path: Path,
) -> None:
    # Each layer is proved by a process of its own. The last layer is right, and stays so.
    target, layers = write_port(tmp_path / "port.py", [], wrong=wrong), ("--layers", f"1:{wrong[-1] + 2}")
    paths = ("--model", toy, "--golden", golden, "--run", run_port("sweep", target, *layers))
    result = command(mm2_diagnose, *paths, "--mistake", "k_v_swapped", "--prove", "--quiet")
    assert result.exit_code == 1
    place, condition = ("", "== 1") if wrong == (1,) else ("Layers 1-2: ", "in (1, 2)")
    assert f"{place}Proved: with the weights changed before the port converts them" in result.stdout
    _, _, behind = result.stdout.partition("at the beginning of convert_state_dict:\n")
    lines = [line[6:] for line in behind.splitlines() if line.startswith("      ")]
    assert lines[0] == f"if layer_idx {condition}:"

    write_port(tmp_path / "port.py", lines, wrong=wrong)
    arguments = ("sweep", "--model", toy, "--golden", golden, "--target", target, "--backend", "cpu", *layers)
    assert command(mm2_test, *arguments, "--output-dir", tmp_path / "again", "--quiet").exit_code == 0


@pytest.mark.slow
def test_each_finding_has_its_proof(run_port: RunPort, prove: Prove) -> None:
    directory = run_port("multi-layer", "one_wrong_layer.py:SoftmaxRouter_at_2", "--layers", "1:4")
    record = prove(directory)
    (found,) = record["diagnosis"]
    assert (found["layer"], found["mistake"], found["proof"]["outcome"]) == (2, "router_softmax", "proved")
    assert found["proof"]["way"] == "stage"


@pytest.mark.slow
def test_port_of_several_ranks_is_run_on_as_many(run_port: RunPort, prove: Prove) -> None:
    port = f"{REPOSITORY / 'scripts' / 'examples' / 'swapped_device_layer.py'}:SwappedDeviceLayer"
    directory = run_port("single-layer", port, "--layer", 1)
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
    run_port: RunPort, prove: Prove, tmp_path: Path
) -> None:
    directory = run_port("single-layer", write_port(tmp_path / "port.py", []), "--layer", 1)
    (tmp_path / "port.py").unlink()
    (found,) = prove(directory, "--mistake", "k_v_swapped")["diagnosis"]
    assert found["proof"]["outcome"] == "not provable"
    assert "the port did not run" in found["proof"]["reason"]
    assert "port.py" in found["proof"]["reason"]

    moved = write_port(tmp_path / "moved.py", ["# mended"])
    record = prove(directory, "--mistake", "k_v_swapped", "--target", moved)
    assert record["diagnosis"][0]["proof"]["outcome"] == "proved"
    assert any("has changed since the run" in note for note in record["notes"])


@pytest.mark.parametrize(
    ("port", "options", "mistake", "reason"),
    [
        ("SwappedWhereDecoded", ("--decode", 4), "gate_up_swapped", "only decoded tokens are wrong"),
        ("BlackBoxOfSmallExperts", (), "moe_delta_scaled", "the scaled sum itself is not shown"),
    ],
)
def test_what_the_layer_alone_cannot_show_is_not_provable(
    run_port: RunPort, prove: Prove, port: str, options: tuple[Any, ...], mistake: str, reason: str
) -> None:
    directory = run_port("single-layer", f"diagnosed.py:{port}", "--layer", 1, *options)
    (found,) = prove(directory, "--mistake", mistake)["diagnosis"]
    assert found["proof"]["outcome"] == "not provable"
    assert reason in found["proof"]["reason"]


class TestDump:
    """Dumps name no port: they prove by what they show."""

    def test_dump_proves_by_its_own_sites_and_says_what_it_does_not_show(
        self, runs: Any, prove: Prove, dumps: Any, tmp_path: Path
    ) -> None:
        dumps.write_nxdi(tmp_path / "dump", runs["swapped"])
        (found,) = prove(tmp_path / "dump", "--mistake", "gate_up_swapped")["diagnosis"]
        proof = found["proof"]
        assert (found["layer"], proof["outcome"], proof["way"]) == (1, "proved", "recomputed")
        assert proof["stage"]["leaves"] < 2 < proof["stage"]["unexplained"]

        for file in (tmp_path / "dump").glob("*layers.1.mlp_output*"):
            file.unlink()
        (found,) = prove(tmp_path / "dump", "--mistake", "gate_up_swapped")["diagnosis"]
        proof = found["proof"]
        assert proof["outcome"] == "not provable"
        assert "there is no port to run, and the dump does not show moe_delta" in proof["reason"]
        assert "mm2-test" in proof["next_step"]

    @pytest.mark.slow
    def test_dump_proves_a_mistake_of_attention(
        self, run_port: RunPort, prove: Prove, dumps: Any, tmp_path: Path
    ) -> None:
        target = "one_wrong_layer.py:TiledKeyValueHeads_at_1"
        dumps.write_nxdi(tmp_path / "dump", Capture.open(run_port("full", target, "--sites", "all")))
        (found,) = prove(tmp_path / "dump", "--mistake", "kv_repeat_tiled")["diagnosis"]
        assert (found["layer"], found["proof"]["outcome"]) == (1, "proved")

    def test_second_mistake_is_not_hidden(
        self, toy: Path, golden: Path, run_port: RunPort, dumps: Any, tmp_path: Path
    ) -> None:
        target = "one_wrong_layer.py:NormPerRankAndSwappedGateUp_at_1"
        dumps.write_nxdi(tmp_path / "dump", Capture.open(run_port("full", target, "--sites", "all")))
        reading, weights = DumpReading(), CheckpointWeights(model=str(toy))
        reference, dump = open_sides(
            golden, tmp_path / "dump", reference_reading=reading, target_reading=reading
        )
        criteria = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
        comparison = compare_captures(
            reference, dump, criteria=criteria, layer_pattern="layer_1", weights=weights
        )
        proofs = RecomputedProofs(golden=reference, dump=dump, comparison=comparison, weights=weights)
        norm, experts = Undo("qk_norm_per_rank", (("tp_degree", 2),)), Undo("gate_up_swapped")
        assert proofs.prove(1, (norm, experts)).is_proved
        for alone in (norm, experts):
            proof = proofs.prove(1, (alone,))
            assert proof.outcome == "not proved"
            assert "is wrong too" in proof.reason
