"""Kill commands that write, at drawn moments, and run them again.

| command | writes |
|---|---|
| `mm2-gpu extract-all` | a golden |
| `mm2-test sweep` | a port's run |
| `mm2-split extract` | the slices of a plan |
| `mm2-compare --report-path` | a report |

SIGKILL comes at a drawn time, up to four times in a row. After each, whatever is there is whole or known as unfinished.
At last the same command ends well, its files are those of an undisturbed run byte for byte, and nothing else is there.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from peaks import package_environment
from port_runs import EXAMPLES

from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.errors import Mm2Error
from torture.tally import Tally

# Longest run of one command in seconds: more is a hang.
_DEADLINE_S = 300.0
_NUM_ROUNDS = 10  # of each command
_MOST_KILLS = 4  # one after the other, before a run comes to its end
Content = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A command: the package that holds it, and its words, of which the last is the folder that it writes."""

    package: str
    words: tuple[str, ...]

    def start(self, folder: Path) -> subprocess.Popen[str]:
        """Start it in a folder, with pipes for its output."""
        return subprocess.Popen(
            [sys.executable, "-m", self.package, *self.words],
            cwd=folder,
            env={**package_environment(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path) -> tuple[int, str]:
        """Run it in a folder to its end; return its exit code and its stderr."""
        process = self.start(folder)
        _, errors = process.communicate(timeout=_DEADLINE_S)
        return process.returncode, errors

    def __str__(self) -> str:
        return f"{self.package} {self.words[0]}"


def make_commands(folder: Path) -> Iterator[CommandLine]:
    """Make a checkpoint, a golden, a run and a plan in a folder, and yield commands that write; each ends well."""
    swapped = f"{EXAMPLES / 'swapped_port.py'}:DecoderLayer"
    nodes = ("--node", "a:memory=1GB", "--node", "b:memory=1GB")
    sides = ("--golden", "golden", "--run", "run", "--model", "toy")
    on_cpu = ("--backend", "cpu", "--target", swapped)
    for package, *words in (
        ("minimax_tools", "synthesize", "--num-hidden-layers", "6", "--output", "toy"),
        ("gpu_reference", "extract-all", "--model", "toy", "--seq-len", "24,17", "--output-dir", "golden"),
        ("neuron", "sweep", "--model", "toy", "--golden", "golden", *on_cpu, "--output-dir", "run"),
        ("minimax_tools", "plan", "--model", "toy", *nodes, "--output", "plan.json"),
        ("minimax_tools", "extract", "--plan", "plan.json", "--node", "a", "--output", "cut"),
        ("compare", *sides, "--report-path", "report"),
    ):
        command = CommandLine(package=package, words=tuple(words))
        exit_code, errors = command.run(folder)
        if exit_code not in (0, 1):
            raise RuntimeError(f"{command} did not run: {errors}")
        if words[-1] not in ("toy", "plan.json"):
            yield command


def run_deaths(scratch: Path, seed: int, *, num_rounds: int = _NUM_ROUNDS) -> Tally:
    """Kill each command that writes a folder in `num_rounds` rounds."""
    tally = Tally(
        promise="a killed run leaves nothing that looks whole, and the next one ends as an undisturbed one"
    )
    draws = random.Random(seed)
    num_killed = 0
    for command in list(make_commands(scratch)):
        place = scratch / command.words[-1]
        num_killed += _torture(command, place, scratch, tally, draws, num_rounds=num_rounds)
    tally.figures["kills"] = num_killed
    return tally


def _torture(
    command: CommandLine, place: Path, folder: Path, tally: Tally, draws: random.Random, *, num_rounds: int
) -> int:
    """Kill a command at drawn moments, and return the number of those that died."""
    shutil.rmtree(place, ignore_errors=True)
    beside = set(folder.iterdir())
    began_s = time.monotonic()
    undisturbed, _ = command.run(folder)
    whole_s = time.monotonic() - began_s
    expected = read_content(place)
    num_killed = 0
    for number in range(num_rounds):
        shutil.rmtree(place, ignore_errors=True)
        for _ in range(draws.randint(1, _MOST_KILLS)):
            moment_s = draws.uniform(0.0, whole_s)
            what = f"{command}, round {number}, at {moment_s:.2f} s"
            num_killed += _kill(command, folder, moment_s)
            half = _find_half(place, expected)
            tally.check(half is None, f"{what}: {half}")
        # What came to its end before the kill is not always made again.
        ends_well = {undisturbed, *((2,) if read_content(place) == expected else ())}
        again, errors = command.run(folder)
        tally.check(again in ends_well, f"{what}: then {again}: {errors[-300:]}")
        found = read_content(place)
        differing = sorted(
            name for name in expected.keys() | found.keys() if found.get(name) != expected.get(name)
        )
        tally.check(not differing, f"{what}: then other {differing}")
        left = [path.name for path in folder.iterdir() if path not in beside and path != place]
        tally.check(not left, f"{what}: left behind {left}")
    return num_killed


def _kill(command: CommandLine, folder: Path, moment_s: float) -> bool:
    """Kill the command and its children at a moment; return False if it ended before."""
    process = command.start(folder)
    try:
        process.communicate(timeout=moment_s)
    except subprocess.TimeoutExpired:
        started = psutil.Process(process.pid)
        for one in (*started.children(recursive=True), started):
            one.kill()
        process.communicate(timeout=_DEADLINE_S)
        return True
    return False


def read_content(place: Path) -> Content:
    """Return the digest of each file below a folder, by its path."""
    return {
        path.relative_to(place).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in place.rglob("*")
        if path.is_file()
    }


def _find_half(place: Path, expected: Content) -> str | None:
    """Return what a killed run left that looks whole and is not; None if all is whole, or known as unfinished."""
    if "manifest.json" not in expected:
        # Paths through temporary folders are no final names.
        found = {name: digest for name, digest in read_content(place).items() if "/." not in f"/{name}"}
        other = sorted(name for name, digest in found.items() if expected.get(name) != digest)
        return f"half written: {other}" if other else None
    try:
        capture = Capture.open(place)
    except Mm2Error:
        return None
    # A run killed at once lists no inputs yet.
    faults = inspect_capture(capture, with_inputs=capture.is_complete).faults
    return "; ".join(faults) or None
