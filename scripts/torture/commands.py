"""Commands of mm2 as processes, each with what it needs to end well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from port_runs import EXAMPLES

from minimax_tools.machine.stops import STOPS

# Longest run of one command in seconds: more is a hang.
DEADLINE_S = 300.0
_REPOSITORY = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A command: the program that users type, the module that holds it, and its words."""

    program: str
    module: str
    words: tuple[str, ...]
    output: Path | None = None  # folder or file that the command writes; None if it only prints

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words that start it as a process."""
        return (sys.executable, "-m", self.module, *self.words)

    def start(self, folder: Path) -> subprocess.Popen[str]:
        """Start it in a folder, with pipes for its output."""
        return subprocess.Popen(
            self.arguments,
            cwd=folder,
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_as_from_a_terminal,
        )

    def run(self, folder: Path, redirection: str = "") -> subprocess.CompletedProcess[str]:
        """Run it in a folder to its end, its streams redirected as the shell's words say."""
        return subprocess.run(
            ["sh", "-c", f'exec "$@" {redirection}', "sh", *self.arguments],
            cwd=folder,
            env=_ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


def make_commands(folder: Path) -> tuple[CommandLine, ...]:
    """Make a checkpoint, a golden and a run in a folder, and return commands that use them; each ends well."""
    swapped = f"{EXAMPLES / 'swapped_port.py'}:DecoderLayer"
    synthesize = _split("synthesize", "--output", "toy", "--num-hidden-layers", "6", output=folder / "toy")
    golden = _command(
        "mm2-gpu", "gpu_reference", "extract-all", "--model", "toy", "--output-dir", "golden",
        "--seq-len", "24,17", output=folder / "golden",
    )  # fmt: skip
    sweep = _command(
        "mm2-test", "neuron", "sweep", "--model", "toy", "--golden", "golden", "--backend", "cpu",
        "--target", swapped, "--output-dir", "run", output=folder / "run",
    )  # fmt: skip
    nodes = ("--node", "a:memory=1GB", "--node", "b:memory=1GB")
    plan = _split("plan", "--model", "toy", *nodes, "--output", "plan.json", output=folder / "plan.json")
    for command in (synthesize, golden, sweep, plan):
        done = command.run(folder)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{command.program} {command.words[0]} did not run: {done.stderr}")
    sides = ("--golden", "golden", "--run", "run", "--model", "toy")
    return (
        golden,
        sweep,
        plan,
        _split("extract", "--plan", "plan.json", "--node", "a", "--output", "cut", output=folder / "cut"),
        _command("mm2-compare", "compare", *sides, "--report-path", "report", output=folder / "report"),
        _command("mm2-diagnose", "compare.diagnosis", *sides),
        _split("memory", "--model", "toy"),
    )


def _as_from_a_terminal() -> None:
    # Under nohup, or in the background of a shell, some signals are ignored, and would be in the command too.
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)


def _command(program: str, module: str, *words: str, output: Path | None = None) -> CommandLine:
    return CommandLine(program=program, module=module, words=words, output=output)


def _split(*words: str, output: Path | None = None) -> CommandLine:
    return _command("mm2-split", "minimax_tools", *words, output=output)
