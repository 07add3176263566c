"""Cut the power of commands that write, at every call that they make, in a model of the disk (`disk_model`).

| command | writes |
|---|---|
| `mm2-gpu extract-all` | a golden |
| `mm2-test sweep` | a port's run |
| `mm2-split extract` | the slices of a plan |
| `mm2-split synthesize` | a checkpoint |
| `mm2-compare --report-path` | a report |

After each loss nothing that is half there is taken for whole: opening refuses it, or all that it lists has its digest.
From some of the losses the same command is run again: it must end well, with an undisturbed run's files.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torture.deaths import Content, Victim, make_victims, read_content
from torture.disk_model import LostPower, losses
from torture.disk_trace import ONE_THREAD, find_missing, trace_command
from torture.tally import Tally

_NUM_RESUMED = 4  # losses of each command after which it is run again


def run_power_loss(scratch: Path, seed: int) -> Tally:
    """Trace each command once, and check every state that the disk may be left in."""
    tally = Tally(promise="after a power loss nothing half written is taken for whole")
    missing = find_missing()
    if missing is not None:
        tally.check(False, missing)
        return tally
    draws = random.Random(seed)
    place = scratch / "victim" / "place"
    num_calls = num_states = 0
    for victim in make_victims(scratch, place):
        place.parent.mkdir()
        exit_code, calls = trace_command(_command(victim), below=place.parent, log=scratch / "calls")
        expected = read_content(place)
        tally.check(exit_code in (0, 1) and bool(expected), f"{victim.name}: exit code {exit_code}")
        states = list(losses(calls, final=place.parent))
        final = states[-1]
        shutil.rmtree(place.parent)
        resumed = set(draws.sample(range(len(states)), k=min(_NUM_RESUMED, len(states))))
        for number, state in enumerate(states):
            what = f"{victim.name}, call {state.after} of {len(calls)} ({state.variant})"
            _build(state, place.parent)
            half = victim.find_half(place, expected)
            tally.check(half is None, f"{what}: {half}")
            if number in resumed:
                _run_again(victim, place, expected, tally, what)
            shutil.rmtree(place.parent)
        _build(final, place.parent)
        tally.check(read_content(place) == expected, f"{victim.name}: the model's last state is another")
        shutil.rmtree(place.parent)
        num_calls += len(calls)
        num_states += len(states)
    tally.figures |= {"calls": num_calls, "states": num_states}
    return tally


def _command(victim: Victim) -> Sequence[str]:
    code = "import sys; from torture.deaths import COMMANDS; COMMANDS[sys.argv.pop(1)]()"
    return [sys.executable, "-c", code, victim.program, *victim.arguments]


def _build(state: LostPower, folder: Path) -> None:
    """Write the files of a state."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in sorted(state.contents.items()):
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.write_bytes(content)


def _run_again(victim: Victim, place: Path, expected: Content, tally: Tally, what: str) -> None:
    # In the environment that it was traced in, of which captures tell.
    done = subprocess.run(_command(victim), env=ONE_THREAD, capture_output=True, text=True, check=False)
    found = read_content(place)
    # What was whole already may be refused to be made again.
    tally.check(done.returncode in (0, 1, 2), f"{what}: then exit code {done.returncode}: {done.stderr}")
    differing = sorted(name for name in expected if found.get(name) != expected[name])
    tally.check(not differing, f"{what}: then other {differing}: {done.stderr}")
    left = sorted(found.keys() - expected.keys())
    tally.check(not left, f"{what}: left behind {left}")
