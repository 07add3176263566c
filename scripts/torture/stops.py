"""Commands that SIGINT, SIGTERM or SIGHUP stops at drawn moments: the same words, exit code 3, nothing left behind."""

from __future__ import annotations

import random
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

from minimax_tools.machine.stops import STOPS
from torture.commands import DEADLINE_S, CommandLine, make_commands
from torture.tally import Tally

_NUM_MOMENTS = 4
# Python itself starts before this; until then a stop has Python's words.
_FIRST_MOMENT_S = 0.4


def run_stops(scratch: Path, seed: int) -> Tally:
    """Stop each command at drawn moments, and then let it go on to its end."""
    drawn = random.Random(seed)
    tally = Tally(promise="a stopped command says so, names the command that goes on, and exits with 3")
    num_stopped = 0
    for command in make_commands(scratch):
        _remove(command)
        began_s = time.monotonic()
        undisturbed = command.run(scratch)
        whole_s = time.monotonic() - began_s
        for stop in STOPS:
            for _ in range(_NUM_MOMENTS):
                _remove(command)
                moment_s = drawn.uniform(_FIRST_MOMENT_S, max(whole_s, 2 * _FIRST_MOMENT_S))
                num_stopped += _stop(tally, command, scratch, stop, moment_s, undisturbed.returncode)
        end = command.run(scratch)
        tally.check(
            end.returncode == undisturbed.returncode,
            f"{_name(command)} after its stops: exit code {end.returncode}: {end.stderr[-300:]}",
        )
    tally.figures["stopped_before_the_end"] = num_stopped
    return tally


def _stop(
    tally: Tally, command: CommandLine, folder: Path, stop: signal.Signals, moment_s: float, usual_code: int
) -> bool:
    """Stop the command once; return False if it ended before."""
    process = command.start(folder)
    time.sleep(moment_s)
    process.send_signal(stop)
    try:
        _, stderr = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _, stderr = process.communicate()
        tally.check(False, f"{_name(command)}, {stop.name} at {moment_s:.2f} s: it did not end")
        return True
    if process.returncode == usual_code and "interrupted" not in stderr:
        return False
    line = shlex.join((command.program, *command.words))
    ends_well = process.returncode == 3 and f": {line}\n" in stderr and "Traceback" not in stderr
    what = f"{_name(command)}, {stop.name} at {moment_s:.2f} s"
    tally.check(ends_well, f"{what}: exit code {process.returncode}, {stderr[-300:]!r}")
    left = [str(path) for path in folder.rglob("*") if ".tmp" in path.name]
    tally.check(not left, f"{what}: left {left}")
    return True


def _remove(command: CommandLine) -> None:
    """Remove what the command writes, so that it writes it again."""
    if command.output is not None and command.output.is_dir():
        shutil.rmtree(command.output)
    elif command.output is not None:
        command.output.unlink(missing_ok=True)


def _name(command: CommandLine) -> str:
    return f"{command.program} {command.words[0]}"
