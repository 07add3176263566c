"""The benchmark of proofs counts rightly, and runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from bench_proof import give_figures
from faults.proofs import ProofCase

from compare.diagnosis.proof.proof import MistakeProof, ProofOutcome, ProofWay

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_proof.py"


def case(kind: str, outcome: ProofOutcome, way: ProofWay | None = None) -> ProofCase:
    proof = MistakeProof(outcome=outcome, way=way)
    return ProofCase(
        plant="a mistake", baseline="short", undone="a name", kind=kind, is_black_box=False, proof=proof
    )


def test_named_mistakes_are_counted_by_outcome_and_way() -> None:
    cases = [
        case("named", ProofOutcome.PROVED, ProofWay.WEIGHTS),
        case("named", ProofOutcome.PROVED, ProofWay.STAGE),
        case("named", ProofOutcome.NOT_PROVABLE),
        case("wrong", ProofOutcome.NOT_PROVED),
    ]
    figures = {figure.figure: figure for figure in give_figures(cases, num_unnamed=0)}
    assert figures["named mistakes"].value == 3
    assert figures["proved by weights"].value == figures["proved by stage"].value == 1
    assert figures["not provable"].value == 1
    assert figures["wrong names proved"].holds


def test_wrong_name_that_is_proved_misses_the_goal() -> None:
    figures = {
        figure.figure: figure
        for figure in give_figures([case("wrong", ProofOutcome.PROVED, ProofWay.STAGE)], num_unnamed=0)
    }
    assert not figures["wrong names proved"].holds


@pytest.mark.slow
def test_benchmark_proves_a_planted_mistake() -> None:
    arguments = ["--parts", "single", "--mistakes", "gate_up_swapped", "--json"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=SCRIPT.parents[1],
        env={"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    figures = {figure["figure"]: figure["value"] for figure in json.loads(done.stdout)["figures"]}
    assert figures["proved by weights"] == 1
    assert figures["wrong names tried"] == 3
