"""Ranks that die or stand still, and a folder that goes away while they write.

| run | started by | what happens to it |
|---|---|---|
| golden by a plan of two slices | torchrun | one rank is killed, one is stopped, the folder is renamed |
| a port's run by two ranks | `mm2-test sweep --tp-degree 2` | the same |

The run must end in time with exit code 3, torchrun with its own, say which rank failed, and leave no process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from cpu_golden import write_model

from minimax_tools.synthetic.toy_model import SyntheticModel
from torture.tally import Tally

_LENGTHS = ("--seq-len", "12,7")
_MODEL = SyntheticModel(
    num_hidden_layers=12, hidden_size=64, num_local_experts=8, intermediate_size=64, vocab_size=512
)
_SILENT_S = 40.0  # mm2-test counts a stopped rank as dead after this time
# torchrun gives the other ranks of a failed one this time to end. Then the machine may be busy.
_ENDING_S = 45.0
_START_S = 300.0

# A port as slow as a true one, so that something can happen to it.
_PORT = """
import time
from neuron.builtin.layer import DeviceLayer

class Port(DeviceLayer):
    reuse = False

    def forward(self, *inputs):
        time.sleep(0.3)
        return super().forward(*inputs)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """An event that strikes a run once a file of its capture is there."""

    name: str
    strike: Callable[[dict[int, psutil.Process], Path], None]
    words: tuple[str, ...]  # words of the error
    within_s: float
    of_golden: bool = True  # whether a golden's ranks notice it, which torchrun watches


def _sent(number: int, rank: int) -> Callable[[dict[int, psutil.Process], Path], None]:
    return lambda ranks, _: ranks[rank].send_signal(number)


def _rename(_: dict[int, psutil.Process], folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _cases() -> Iterator[_Case]:
    for rank in (0, 1):
        named = f"rank {rank}"
        yield _Case(
            name=f"{named} killed",
            strike=_sent(signal.SIGKILL, rank),
            words=(named, "failed"),
            within_s=_ENDING_S,
        )
        yield _Case(
            name=f"{named} stopped",
            strike=_sent(signal.SIGSTOP, rank),
            words=(named, "failed", f"for {_SILENT_S:.0f} s"),
            within_s=_SILENT_S + _ENDING_S,
            of_golden=False,
        )
    yield _Case(name="folder renamed", strike=_rename, words=("runs/capture",), within_s=_ENDING_S)


def run_dying_ranks(scratch: Path, _: int) -> Tally:
    """Let each thing happen to each run."""
    tally = Tally(promise="a run whose rank or folder is gone ends in time, names it, and leaves no process")
    write_model(scratch / "model", _MODEL, dtype=torch.bfloat16)
    (scratch / "port.py").write_text(_PORT, encoding="utf-8")
    golden = _command("gpu_reference", "extract-all", scratch, "--output-dir", str(scratch / "golden"))
    _require(golden)
    plan = scratch / "plan.json"
    nodes = ("--node", "a:memory=1GB,layers=0:6", "--node", "b:memory=1GB,layers=6:12")
    planned = ("plan", "--planner", "manual", *nodes, "--model", str(scratch / "model"))
    code = "from minimax_tools.__main__ import main; main()"
    _require([sys.executable, "-c", code, *planned, "--output", str(plan)])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    slowest = 0.0
    for case in _cases():
        golden = _command(
            "gpu_reference", "extract-all", scratch, "--plan", str(plan), "--stream", "on", launcher=torchrun
        )
        if case.of_golden:
            # torchrun names a killed rank; the other one says that it lost it, or was told to stop.
            told = replace(case, words=("rank",) if case.name.endswith("killed") else case.words)
            slowest = max(slowest, _try("golden", golden, told, scratch, tally, exit_codes=(1, 3)))
        device = _command(
            "neuron", "sweep", scratch, "--golden", str(scratch / "golden"), "--backend", "cpu", "--json"
        )
        device += ["--tp-degree", "2", "--target", f"{scratch / 'port.py'}:Port"]
        slowest = max(slowest, _try("sweep", device, case, scratch, tally, exit_codes=(3,)))
    tally.figures["slowest_end_s"] = slowest
    return tally


def _command(
    module: str, name: str, scratch: Path, *options: str, launcher: list[str] | None = None
) -> list[str]:
    lengths = _LENGTHS if module == "gpu_reference" else ()
    model = ("--model", str(scratch / "model"), *lengths)
    return [sys.executable, *(launcher or []), "-m", module, name, *model, "--quiet", *options]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _require(command: list[str]) -> None:
    subprocess.run(command, env=_environment(), check=True, capture_output=True)


def _try(
    run: str, command: list[str], case: _Case, scratch: Path, tally: Tally, *, exit_codes: tuple[int, ...]
) -> float:
    """Let something happen to a run, and return the seconds from then until its end."""
    folder, what = scratch / "runs" / "capture", f"{run}, {case.name}"
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.parent.mkdir()
    errors = scratch / "stderr"
    with errors.open("w+", encoding="utf-8") as stderr:
        launcher = subprocess.Popen(
            [*command, "--output-dir", str(folder)],
            env=_environment(),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        ranks = _find_ranks(launcher, folder)
        if len(ranks) != 2:
            tally.check(False, f"{what}: it ended too soon: {errors.read_text(encoding='utf-8')[-300:]}")
            launcher.kill()
            launcher.wait()
            return 0.0
        begun_s = time.monotonic()
        processes = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
        case.strike(ranks, folder)
        try:
            exit_code: int | None = launcher.wait(case.within_s)
        except subprocess.TimeoutExpired:
            exit_code = None
    duration_s = time.monotonic() - begun_s
    text = errors.read_text(encoding="utf-8")
    told = [line for line in text.splitlines() if "Error: " in line]
    tally.check(exit_code is not None, f"{what}: it did not end within {case.within_s:.0f} s")
    tally.check(exit_code in (None, *exit_codes), f"{what}: exit code {exit_code}")
    is_named = any(all(word in line for word in case.words) for line in told)
    tally.check(is_named, f"{what}: no error with {case.words}: {told or text[-300:]}")
    left = [process for process in processes if process.is_running() and process.status() != "zombie"]
    tally.check(not left, f"{what}: left {left}")
    for process in left:
        process.kill()
    launcher.wait()
    return duration_s


def _find_ranks(launcher: subprocess.Popen[bytes], folder: Path) -> dict[int, psutil.Process]:
    """Return the processes of the ranks by number, once two layers are stored; {} if the run ended before."""
    deadline_s = time.monotonic() + _START_S
    while _num_layers(folder) < 2:
        if launcher.poll() is not None or time.monotonic() > deadline_s:
            return {}
        time.sleep(0.002)
    ranks: dict[int, psutil.Process] = {}
    for child in psutil.Process(launcher.pid).children(recursive=True):
        number = child.environ().get("RANK")
        if number is not None:
            ranks.setdefault(int(number), child)
    return ranks


def _num_layers(folder: Path) -> int:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    return len(manifest.get("complete_layers", ()))
