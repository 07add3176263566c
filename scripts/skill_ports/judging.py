"""Judging: a repaired port against a second golden, whose tokens the repair has not seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.errors import CannotRunError
from minimax_tools.results.results import Verdict

MODEL, GOLDEN, HIDDEN_GOLDEN = "model", "golden", "hidden_golden"
PORT = "port.py"

_NUM_LAYERS = "3"
# Lengths of the random prompts, in tokens, and their seeds. Those of the hidden golden are others.
_SHOWN, _HIDDEN = ("48,33", "0"), ("61,40", "7")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairJudgement:
    """The verdict on a repaired port."""

    verdict: Verdict  # of a sweep over all layers of the hidden golden
    compared: int  # sites that were judged
    of: int  # sites that the run declares
    error: str = ""  # why the port did not run; empty if it did

    @property
    def is_repaired(self) -> bool:
        """True if every site of every layer was judged, and is right."""
        return self.verdict is Verdict.PASS and self.compared == self.of > 0


def make_material(agents: Path, evaluators: Path) -> None:
    """Make the toy checkpoint and its golden for the agent, and a second golden for the evaluator.

    Raises:
        CannotRunError: A command fails.
    """
    agents.mkdir(parents=True)
    # Run in the agent's folder: a golden records its checkpoint as it was named, and must not name another folder.
    _run(agents, "minimax_tools", "synthesize", "--output", MODEL, "--num-hidden-layers", _NUM_LAYERS)
    for golden, (lengths, seed) in ((Path(GOLDEN), _SHOWN), (evaluators.resolve() / HIDDEN_GOLDEN, _HIDDEN)):
        words = ("--model", MODEL, "--seq-len", lengths, "--seed", seed, "--output-dir", str(golden))
        _run(agents, "gpu_reference", "extract-all", *words, "--certify")


def judge_repair(port: Path, *, model: Path, golden: Path, directory: Path) -> RepairJudgement:
    """Judge a port by a sweep over all layers of a golden; its capture goes to `directory`."""
    target = (
        "--target",
        f"{port}:DecoderLayer",
        "--backend",
        "cpu",
        "--output-dir",
        str(directory),
        "--overwrite",
    )
    done = _start("neuron", "sweep", "--model", str(model), "--golden", str(golden), *target)
    try:
        record = json.loads(done.stdout)
        verdict, counts = Verdict(record["verdict"]), (record["compared"], record["of"])
    except (json.JSONDecodeError, KeyError, ValueError):
        return RepairJudgement(verdict=Verdict.INCOMPARABLE, compared=0, of=0, error=done.stderr.strip())
    return RepairJudgement(
        verdict=verdict, compared=counts[0], of=counts[1], error=str(record.get("error", ""))
    )


def _run(folder: Path, module: str, *arguments: str) -> None:
    done = _start(module, *arguments, folder=folder)
    if done.returncode:
        raise CannotRunError(f"{module} {' '.join(arguments)} failed", found=done.stderr.strip())


def _start(module: str, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    # mm2 is found as in this process, from whichever folder.
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", module, *arguments, "--json", "--quiet"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
