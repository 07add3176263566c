"""Kill commands that write, at drawn moments, and run them again.

| command | writes |
|---|---|
| `mm2-gpu extract-all` | a golden |
| `mm2-test sweep` | a port's run |
| `mm2-split extract` | the slices of a plan |
| `mm2-split synthesize` | a checkpoint |
| `mm2-compare --report-path` | a report |

SIGKILL comes at a drawn time, or at a drawn change of a file, up to four times in a row. After each, whatever is there
is whole or known as unfinished. At last the same command ends well, its files are those of an undisturbed run byte for
byte, and nothing else is there.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import os
import pkgutil
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import click

import compare
import gpu_reference
import minimax_tools
import neuron
import reports
from compare.cli import main as mm2_compare
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.cli import mm2_split
from minimax_tools.errors import Mm2Error, UsageError
from neuron.cli import main as mm2_test
from torture.tally import Tally

_NUM_ROUNDS = 10  # of each command
_MOST_KILLS = 4  # one after the other, before a run comes to its end
_LENGTHS = "12,7"
_MODEL = (
    *("--num-hidden-layers", "3", "--hidden-size", "64", "--num-local-experts", "4", "--vocab-size", "512"),
    *("--num-experts-per-tok", "2", "--intermediate-size", "64", "--dtype", "bfloat16"),
)
Content = dict[str, str]
COMMANDS: Mapping[str, click.Command] = MappingProxyType(
    {"mm2-gpu": mm2_gpu, "mm2-test": mm2_test, "mm2-split": mm2_split, "mm2-compare": mm2_compare}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A command, and the check that what a killed one left is not taken for whole."""

    name: str
    program: str  # one of COMMANDS
    arguments: tuple[str, ...]
    find_half: Callable[
        [Path, Content], str | None
    ]  # of the place and an undisturbed run's files: what is half


def run_deaths(scratch: Path, seed: int, *, num_rounds: int = _NUM_ROUNDS) -> Tally:
    """Kill each command in `num_rounds` rounds."""
    tally = Tally(
        promise="a killed run leaves nothing that looks whole, and the next one ends as an undisturbed one"
    )
    draws = random.Random(seed)
    # Forks share what is imported, and need not look at it. This process computes nothing: torch's threads, and its
    # pool of them, do not outlive a fork.
    importlib.import_module("transformers.models.minimax_m2.modeling_minimax_m2")
    gc.freeze()
    num_killed = 0
    for victim in make_victims(scratch, scratch / "victim" / "place"):
        num_killed += _torture(victim, scratch / "victim" / "place", tally, draws, num_rounds=num_rounds)
    tally.figures["kills"] = num_killed
    return tally


def make_victims(scratch: Path, place: Path) -> Iterator[Victim]:
    """Make what the commands need, and yield them; each writes to `place`."""
    model, golden, run, plan = (str(scratch / name) for name in ("model", "golden", "run", "plan.json"))
    on_model = ("--model", model)
    made = ("synthesize", *_MODEL)
    device = ("sweep", *on_model, "--golden", golden, "--backend", "cpu", "--quiet")
    capture = ("extract-all", *on_model, "--seq-len", _LENGTHS, "--quiet")
    nodes = ("--node", "a:memory=1GB,layers=0:1", "--node", "b:memory=1GB,layers=1:3")
    planned = ("plan", *on_model, "--planner", "manual", *nodes)
    for program, arguments in (
        ("mm2-split", (*made, "--output", model)),
        ("mm2-gpu", (*capture, "--output-dir", golden)),
        ("mm2-test", (*device, "--output-dir", run)),
        ("mm2-split", (*planned, "--output", plan)),
    ):
        done = run_forked(COMMANDS[program], arguments, place=scratch / "none")
        if done.exit_code != 0:
            raise RuntimeError(f"{arguments[0]} ended with {done.exit_code}: {done.text}")
    output, output_dir = ("--output", str(place)), ("--output-dir", str(place))
    compare = ("--golden", golden, "--run", run, *on_model, "--report-path", str(place))
    for program, arguments, find_half in (
        ("mm2-gpu", (*capture, *output_dir), _half_capture),
        ("mm2-test", (*device, *output_dir), _half_capture),
        ("mm2-split", ("extract", "--plan", plan, *on_model, "--all-nodes", *output), _half_file),
        ("mm2-split", (*made, *output), _half_file),
        ("mm2-compare", compare, _half_file),
    ):
        name = program if program == "mm2-compare" else arguments[0]
        yield Victim(name=name, program=program, arguments=arguments, find_half=find_half)


def _torture(victim: Victim, place: Path, tally: Tally, draws: random.Random, *, num_rounds: int) -> int:
    """Kill a command at drawn moments, and return the number of those that died."""

    def run(**kill: float | int | None) -> Ended:
        return run_forked(COMMANDS[victim.program], victim.arguments, place=place, **kill)  # type: ignore[arg-type]

    place.parent.mkdir()
    undisturbed = run()
    expected = read_content(place)
    if undisturbed.exit_code not in (0, 1) or not expected:
        raise RuntimeError(f"{victim.name} ended with {undisturbed.exit_code}: {undisturbed.text}")
    num_killed = 0
    for number in range(num_rounds):
        shutil.rmtree(place)
        for _ in range(draws.randint(1, _MOST_KILLS)):
            moment: dict[str, float | int | None]
            if draws.random() < 0.5:
                moment = {"kill_after_s": draws.uniform(0.0, undisturbed.duration_s)}
            else:
                moment = {"kill_at_event": draws.randint(1, undisturbed.num_events)}
            what = f"{victim.name}, round {number} ({moment})"
            num_killed += run(**moment).exit_code < 0
            half = victim.find_half(place, expected)
            tally.check(half is None, f"{what}: {half}")
        # A checkpoint that came to its end before the kill is not made again.
        ends_well = {
            undisturbed.exit_code,
            *((UsageError.exit_code,) if read_content(place) == expected else ()),
        }
        again = run()
        tally.check(again.exit_code in ends_well, f"{what}: then {again.exit_code}: {again.text}")
        found = read_content(place)
        differing = sorted(name for name in expected if found.get(name) != expected[name])
        tally.check(not differing, f"{what}: then other {differing}")
        left = sorted(found.keys() - expected.keys()) + [
            path.name for path in place.parent.iterdir() if path != place
        ]
        tally.check(not left, f"{what}: left behind {left}")
        if not place.exists():
            place.mkdir()
    shutil.rmtree(place.parent)
    return num_killed


def read_content(place: Path) -> Content:
    """Return the digest of each file below a folder, by its path."""
    return {
        path.relative_to(place).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in place.rglob("*")
        if path.is_file()
    }


def _half_capture(place: Path, _: Content) -> str | None:
    """Return what is wrong with a capture that a killed run left; None if it is refused, or all it lists is whole."""
    try:
        capture = Capture.open(place)
    except Mm2Error:
        return None
    # A run killed at once lists no inputs yet.
    faults = inspect_capture(capture, with_inputs=capture.is_complete).faults
    return "; ".join(faults) or None


def _half_file(place: Path, expected: Content) -> str | None:
    """Return what is there under its final name and is not an undisturbed run's."""
    # Paths through temporary folders are no final names.
    found = {name: digest for name, digest in read_content(place).items() if "/." not in f"/{name}"}
    other = sorted(name for name, digest in found.items() if expected.get(name) != digest)
    return f"half written: {other}" if other else None


# Changes of files, as Python's audit hooks name them. What Rust and torch write they do not see.
_EVENTS = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"})
# Longest time of a command of a toy, in seconds.
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a command."""

    exit_code: int  # negative: the signal that ended it
    text: str  # what it printed
    duration_s: float
    num_events: int  # changes of files beside or below `place`


def run_forked(
    command: click.Command,
    arguments: tuple[str, ...],
    *,
    place: Path,
    kill_after_s: float | None = None,
    kill_at_event: int | None = None,
) -> Ended:
    """Run a command in a fork; kill it after a time, or at its n-th change of a file beside or below `place`."""
    output, counter = place.parent / ".printed", place.parent / ".events"
    output.touch()
    counter.touch()
    _import_packages()
    begun_s = time.monotonic()
    process = os.fork()
    if process == 0:
        _run(lambda: command.main(list(arguments)), place, output, counter, kill_at_event)
    deadline_s = begun_s + (_LIMIT_S if kill_after_s is None else kill_after_s)
    while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
        if time.monotonic() >= deadline_s:
            os.kill(process, signal.SIGKILL)
            ended = os.waitpid(process, 0)
            break
        time.sleep(0.001)
    text = output.read_text(encoding="utf-8", errors="replace")
    num_events = len(counter.read_bytes())
    output.unlink()
    counter.unlink()
    return Ended(
        exit_code=os.waitstatus_to_exitcode(ended[1]),
        text=text,
        duration_s=time.monotonic() - begun_s,
        num_events=num_events,
    )


@functools.cache
def _import_packages() -> None:
    """Import what the commands work with, once for all forks."""
    for package in (minimax_tools, reports, compare, gpu_reference, neuron):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(".__main__"):
                importlib.import_module(module.name)


def _run(
    call: Callable[[], object], place: Path, output: Path, counter: Path, kill_at_event: int | None
) -> None:
    """Run the command in this process, the fork, and end it."""
    exit_code = 99
    try:
        descriptor = os.open(output, os.O_WRONLY)
        events = os.open(counter, os.O_WRONLY)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        num_left = [kill_at_event]

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if event not in _EVENTS or not arguments or str(place.parent) not in str(arguments[0]):
                return
            os.write(events, b".")
            if num_left[0] is not None:
                num_left[0] -= 1
                if num_left[0] <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        call()
        exit_code = 0
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
