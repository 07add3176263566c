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
import time
from pathlib import Path

import psutil

from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.errors import Mm2Error
from torture.commands import DEADLINE_S, CommandLine, make_commands, name_command
from torture.tally import Tally

_NUM_ROUNDS = 10  # of each command
_MOST_KILLS = 4  # one after the other, before a run comes to its end
Content = dict[str, str]


def run_deaths(scratch: Path, seed: int, *, num_rounds: int = _NUM_ROUNDS) -> Tally:
    """Kill each command that writes a folder in `num_rounds` rounds."""
    tally = Tally(
        promise="a killed run leaves nothing that looks whole, and the next one ends as an undisturbed one"
    )
    draws = random.Random(seed)
    num_killed = 0
    for command in make_commands(scratch):
        # A plan is one file, and other commands print alone.
        if command.output is not None and not command.output.suffix:
            num_killed += _torture(command, command.output, scratch, tally, draws, num_rounds=num_rounds)
    tally.figures["kills"] = num_killed
    return tally


def _torture(
    command: CommandLine, place: Path, folder: Path, tally: Tally, draws: random.Random, *, num_rounds: int
) -> int:
    """Kill a command at drawn moments, and return the number of those that died."""
    shutil.rmtree(place, ignore_errors=True)
    beside = set(folder.iterdir())
    began_s = time.monotonic()
    undisturbed = command.run(folder)
    whole_s = time.monotonic() - began_s
    expected = read_content(place)
    num_killed = 0
    for number in range(num_rounds):
        shutil.rmtree(place, ignore_errors=True)
        for _ in range(draws.randint(1, _MOST_KILLS)):
            moment_s = draws.uniform(0.0, whole_s)
            what = f"{name_command(command)}, round {number}, at {moment_s:.2f} s"
            num_killed += _kill(command, folder, moment_s)
            half = _find_half(place, expected)
            tally.check(half is None, f"{what}: {half}")
        # What came to its end before the kill is not always made again.
        ends_well = {undisturbed.returncode, *((2,) if read_content(place) == expected else ())}
        again = command.run(folder)
        tally.check(
            again.returncode in ends_well,
            f"{what}: then {again.returncode}: {again.stderr[-300:]}",
        )
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
        process.communicate(timeout=DEADLINE_S)
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
