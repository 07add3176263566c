"""Commands of mm2 as processes: some are stopped by signals, some have closed or full streams."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from port_runs import EXAMPLES

from minimax_tools.machine.stops import STOPS
from torture.tally import Tally

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


# Redirections after which a command must tell that its result is lost, and those that it survives.
_LOST = (">&-", ">/dev/full", ">&- 2>/dev/null", ">/dev/full <&-")
_SURVIVED = ("2>&-", "2>/dev/full", "<&-", "<&- 2>&-", ">/dev/null")


def run_streams(scratch: Path, _: int) -> Tally:
    """Run every command with every redirection, as text and as JSON where it has both."""
    tally = Tally(promise="closed and full streams end in one line of words, or change nothing")
    for command in make_commands(scratch):
        name = f"{command.program} {command.words[0]}"
        usual_code = command.run(scratch).returncode
        for redirection in _SURVIVED:
            done = command.run(scratch, redirection)
            tally.check(
                done.returncode == usual_code, f"{name} {redirection}: {done.returncode}, {done.stderr}"
            )
        for redirection in _LOST:
            done = command.run(scratch, redirection)
            errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
            tells = errors and all("standard output" in line for line in errors)
            is_mute = "2>" in redirection
            tally.check(
                done.returncode == 3 and (is_mute or bool(tells)) and "Traceback" not in done.stderr,
                f"{name} {redirection}: {done.returncode}, {done.stderr[-300:]}",
            )
    return tally


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
            f"{name_command(command)} after its stops: exit code {end.returncode}: {end.stderr[-300:]}",
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
        tally.check(False, f"{name_command(command)}, {stop.name} at {moment_s:.2f} s: it did not end")
        return True
    if process.returncode == usual_code and "interrupted" not in stderr:
        return False
    line = shlex.join((command.program, *command.words))
    ends_well = process.returncode == 3 and f": {line}\n" in stderr and "Traceback" not in stderr
    what = f"{name_command(command)}, {stop.name} at {moment_s:.2f} s"
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


def name_command(command: CommandLine) -> str:
    """Name a command in messages."""
    return f"{command.program} {command.words[0]}"
