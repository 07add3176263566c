"""Ranks that die, fail, hang or are stopped: the run ends within seconds, says which it was, and leaves none behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

SHORT = ("--seq-len", "12,7", "--backend", "cpu")
# Three processes import torch, on a machine that may have much else to do.
DEADLINE_S = 300

# How the lead and the rank itself begin its error.
ERRORS = ("Error: rank 1 failed: ", "rank 1: Error: ")

# What rank 1 does in layer 1, of which rank 0 waits for a part.
TROUBLED_PORT = """
import signal, time
from pathlib import Path
from neuron.builtin.layer import DeviceLayer

class Port(DeviceLayer):
    reuse = False

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.is_troubled = layer_idx == 1 and config.ranks.rank == 1

    def forward(self, *inputs):
        if self.is_troubled:
            Path("reached").touch()
            {trouble}
        return super().forward(*inputs)
"""


# A sum that rank 0 alone asks for.
LONELY_SUM = """
import os
from datetime import timedelta
import torch
from minimax_tools.errors import Mm2Error
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import open_runtime

ranks = Ranks(rank=int(os.environ["RANK"]), degree=2)
try:
    with open_runtime("cpu", ranks=ranks, patience=timedelta(seconds=10)) as runtime:
        if ranks.is_lead:
            torch.distributed.all_reduce(torch.ones(1))
        else:
            runtime.messages.receive()
except Mm2Error as error:
    print(f"{ranks.rank}: {error}\\n", end="")
"""


@pytest.fixture
def sweep_of(small: Path, write_port: Any) -> Callable[[str], tuple[object, ...]]:
    """The command that runs three layers on two ranks, of which the second gets into trouble."""

    def words(trouble: str) -> tuple[object, ...]:
        target = write_port(TROUBLED_PORT.format(trouble=trouble))
        return (
            "multi-layer",
            "--layers",
            "0:3",
            "--model",
            small,
            *SHORT,
            "--tp-degree",
            2,
            "--target",
            target,
        )

    return words


@pytest.fixture
def hanging(
    sweep_of: Any, environment_of: Any, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A run whose rank 1 sleeps in its port, and the processes of its ranks; what is left of it is ended."""
    with subprocess.Popen(
        [sys.executable, "-m", "neuron", *map(str, sweep_of("time.sleep(600)"))],
        cwd=tmp_path,
        env=environment_of(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background, or under nohup, ignore these signals, and so would the run.
        preexec_fn=lambda: [signal.signal(stop, signal.SIG_DFL) for stop in (signal.SIGINT, signal.SIGHUP)],
    ) as launcher:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not (tmp_path / "reached").exists():
                assert time.monotonic() < deadline, "the port did not run"
                time.sleep(0.05)
            yield launcher, psutil.Process(launcher.pid).children(recursive=True)
        finally:
            launcher.kill()


def test_a_rank_that_is_killed_is_named_and_the_run_resumes(
    forked: Any, sweep_of: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "capture"
    sweep = sweep_of("os.kill(os.getpid(), signal.SIGKILL)")
    done = forked(*sweep, "--output-dir", directory, "--json")
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    end = "it was ended by SIGKILL (often by the kernel, where memory ran out)"
    assert error.startswith(f"rank 1 failed: {end} while ")
    assert f"while running layer 1 of port {sweep[-1]} on hidden states [2, 12, 64]" in error
    assert "rank 0" not in done.stderr
    assert json.loads((directory / "manifest.json").read_text())["complete_layers"] == [0]


@pytest.mark.slow
def test_an_error_on_a_rank_is_told_once_by_it_and_once_by_the_lead(forked: Any, sweep_of: Any) -> None:
    sweep = sweep_of("raise ValueError('no such head')")
    done = forked(*sweep, "--quiet")
    assert done.returncode == 3
    text = f"port {sweep[-1]}, layer 1 failed while it ran: found ValueError: no such head, at "
    errors = sorted(line for line in done.stderr.splitlines() if "Error" in line)
    assert [line.startswith(start + text) for line, start in zip(errors, ERRORS, strict=True)] == [True, True]


@pytest.mark.slow
def test_a_rank_that_prints_does_not_get_between_the_results(forked: Any, sweep_of: Any) -> None:
    done = forked(*sweep_of("print('in between', flush=True)"), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["layers"]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_stopped_leaves_no_rank_behind(hanging: Any, sent: int) -> None:
    launcher, ranks = hanging
    assert len(ranks) >= 2
    launcher.send_signal(sent)
    _, stderr = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 3
    assert "Error: interrupted" in stderr
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_a_rank_that_dies_while_the_lead_computes_on_is_named(hanging: Any) -> None:
    launcher, ranks = hanging
    (rank,) = (process for process in ranks if process.environ().get("RANK") == "1")
    rank.send_signal(signal.SIGKILL)
    _, stderr = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 3
    assert "Error: rank 1 failed: it was ended by SIGKILL" in stderr


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_says_so(torchrun: Any, tmp_path: Path) -> None:
    (tmp_path / "lonely.py").write_text(LONELY_SUM)
    lead, other = sorted(torchrun(tmp_path / "lonely.py").stdout.splitlines())
    assert "rank 0 waited in vain for the other ranks. All must make the same collective calls" in lead
    assert other.startswith("1: rank 0 failed: ")


@pytest.mark.slow
def test_under_torchrun_every_rank_but_one_is_silent(torchrun: Any, small: Path, tmp_path: Path) -> None:
    run = ("single-layer", "--layer", 0, "--model", small, *SHORT, "--json")
    done = torchrun("-m", "neuron", *run, "--output-dir", tmp_path / "capture")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layers"]
    manifest = json.loads((tmp_path / "capture" / "manifest.json").read_text())
    assert manifest["provenance"]["options"]["tp_degree"] == 2
