"""Ports that end the process that runs them, or never end: each is a failed run that says where, and no verdict."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from deaths import DEATHS, Death, write_port

REPOSITORY = Path(__file__).parents[3]
# Processes import torch, on a machine that may have much else to do.
DEADLINE_S = 300
# A layer of the small model takes milliseconds; beside much other work, or as ranks, it takes seconds.
LAYER_TIMEOUT_S = 15
RANK_TIMEOUT_S = 60

# Runs several commands, each supervised as from a shell, in a process that has torch imported.
SUPERVISED = """
import json, os, sys, tempfile
from neuron.cli import main
from minimax_tools.command_line.console import print_error
from neuron.process.supervisor import supervise
kept, done = [os.dup(1), os.dup(2)], {}
for name, arguments in json.loads(sys.stdin.read()).items():
    files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
    for number, file in zip((1, 2), files):
        os.dup2(file.fileno(), number)
    sys.argv = ["mm2-test", *arguments]
    exit_code = supervise(main, arguments, print_error=print_error)
    sys.stdout.flush(), sys.stderr.flush()
    texts = {}
    for number, file, stream in zip((1, 2), files, ("stdout", "stderr")):
        os.dup2(kept[number - 1], number)
        file.seek(0)
        texts[stream] = file.read().decode()
    done[name] = {"exit_code": exit_code, **texts}
print(json.dumps(done))
"""
# What a port does once, in the layer that dies.
ONCE = "done = Path('died'); done.exists() or (done.touch(), os._exit(0))"
# Registered by a port, to be called when Python ends.
LATE = "atexit.register(lambda: (os.write(1, b'late'), os._exit({exit_code})))"
# Changes the working folder and what else a process shares, as no port should.
DISTURBING = (
    "os.chdir({folder!r}); os.umask(0o777); sys.stdout = sys.stderr = open(os.devnull, 'w'); "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
)
PLACES = ("imported", "built", "converted", "run")
Start = Callable[[str], "tuple[Any, psutil.Process]"]
EVERY_COMMAND = ("bisect", "sweep", "component", "full", "trace", "weights")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """End of a command."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        (line,) = (line for line in self.stderr.splitlines() if line.startswith("Error: "))
        return line.removeprefix("Error: ")


def layers_of(model: Path, target: str, directory: Path) -> tuple[object, ...]:
    """The command that runs three layers of a target."""
    common = ("--model", model, "--seq-len", "12,7", "--backend", "cpu", "--target", target)
    return ("multi-layer", "--layers", "0:3", *common, "--output-dir", directory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dying")


@pytest.fixture(scope="module")
def ended(
    forked_python: Any,
    small: Path,
    small_fp8: Path,
    small_golden: Path,
    on_small: tuple[object, ...],
    folder: Path,
) -> dict[str, Ended]:
    """The ends of all commands of this file, by name."""
    commands: dict[str, tuple[object, ...]] = {}
    for death in DEATHS:
        command = layers_of(small, death.write(folder), folder / death.name)
        limit = ("--layer-timeout", LAYER_TIMEOUT_S) if death.is_endless else ()
        commands[death.name] = (*command, "--json", *limit)
    once = layers_of(small, write_port(folder / "once.py", {"run": ONCE}), folder / "once")
    commands |= {"once": once, "once more": once}
    wrong = {"imported": LATE.format(exit_code=0), "run": "return super().forward(*args) * 1.5"}
    for name, layer, places in (
        ("late 0", 2, wrong),
        ("late 1", 1, {"imported": LATE.format(exit_code=1)}),
    ):
        port = ("--target", write_port(folder / f"{name}.py", places), "--output-dir", folder / name)
        commands[name] = ("single-layer", "--layer", layer, *on_small, "--backend", "cpu", *port, "--json")
    target = ("--target", write_port(folder / "port.py", {"run": "os._exit(0)"}))
    on_golden = (*target, *on_small, "--backend", "cpu")
    on_tokens = (*target, "--model", small)
    moe = ("--layer", 2, "--component", "moe")
    commands |= {
        "bisect": ("bisect", *on_golden, "--output-dir", folder / "bisection"),
        "sweep": ("sweep", *on_golden, "--output-dir", folder / "sweep"),
        "component": ("component", *on_golden, *moe, "--output-dir", folder / "component"),
        "full": ("full", *on_tokens, "--backend", "cpu", "--output-dir", folder / "full"),
        "trace": ("trace", *on_tokens, "--layer", 2, "--output", folder / "layer.pt2"),
        "weights": ("weights", *on_tokens, "--layer", 2),
    }
    exits = write_port(folder / "exits.py", {"run": "sys.exit(0)"})
    commands["weights exits"] = ("weights", "--target", exits, "--model", small, "--layer", 2)
    (folder / "elsewhere").mkdir()
    for place in PLACES:
        code = DISTURBING.format(folder=str(folder / "elsewhere"))
        write_port(folder / f"disturbing_{place}.py", {place: code})
        model, of_golden = (Path(os.path.relpath(path, folder)) for path in (small_fp8, small_golden))
        # One report is enough, for the port that disturbs all that follows: its charts take long.
        report = ("--report-path", "report") if place == PLACES[0] else ()
        commands[f"disturbed {place}"] = (
            *("sweep", "--target", f"disturbing_{place}.py:Port", "--model", model, "--golden", of_golden),
            # The port disturbs in layer 2; layer 3 runs after it.
            *("--layers", "2:4", "--sites", "component"),
            *("--backend", "cpu", "--output-dir", f"run_{place}", *report, "--json"),
        )
    commands["disturbed trace"] = (
        *("trace", "--target", "disturbing_imported.py:Port", "--model", model, "--layer", 1),
        *("--output", "traced/layer.pt2", "--json"),
    )
    done = forked_python(
        SUPERVISED,
        folder=folder,
        standard_input=json.dumps({name: [str(word) for word in words] for name, words in commands.items()}),
    )
    assert done.returncode == 0, done.stderr
    return {name: Ended(**how) for name, how in json.loads(done.stdout).items()}


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: death.name)
def test_no_end_of_a_port_is_a_verdict_and_each_says_where(
    ended: dict[str, Ended], folder: Path, death: Death
) -> None:
    one = ended[death.name]
    assert one.exit_code == 3, one
    assert f"{death.name}.py" in one.error
    assert [word for word in death.words if word not in one.error] == [], one.error
    # Whole, and the only thing there.
    record = json.loads(one.stdout)
    assert (record["verdict"], record["exit_code"], record["error"]) == ("incomparable", 3, one.error)
    if death.is_in_forward:
        assert "layer 2" in one.error
        manifest = json.loads((folder / death.name / "manifest.json").read_text())
        assert manifest["complete_layers"] == [0, 1]


def test_layers_before_the_end_are_kept_and_gone_on_with(ended: dict[str, Ended], folder: Path) -> None:
    died, resumed = ended["once"], ended["once more"]
    assert (died.exit_code, resumed.exit_code) == (3, 0)
    assert "Finished layers are kept" in died.error
    assert "after layer 1" in resumed.stderr
    manifest = json.loads((folder / "once" / "manifest.json").read_text())
    assert manifest["complete_layers"] == [0, 1, 2]


@pytest.mark.parametrize(("name", "exit_code", "verdict"), [("late 0", 1, "fail"), ("late 1", 0, "pass")])
def test_what_a_port_does_behind_the_verdict_changes_nothing(
    ended: dict[str, Ended], name: str, exit_code: int, verdict: str
) -> None:
    one = ended[name]
    assert (one.exit_code, json.loads(one.stdout)["verdict"]) == (exit_code, verdict)


@pytest.mark.parametrize("name", EVERY_COMMAND)
def test_every_command_that_runs_a_port_knows_an_end_from_a_verdict(
    ended: dict[str, Ended], name: str
) -> None:
    one = ended[name]
    assert (one.exit_code, one.stdout) == (3, "")
    assert "exit code 0, without a verdict, while running " in one.error
    assert "layer 2" in one.error
    assert "port.py:Port" in one.error


def test_trial_of_weights_that_a_port_exits_from_is_a_failed_run(ended: dict[str, Ended]) -> None:
    one = ended["weights exits"]
    assert (one.exit_code, one.stdout) == (3, "")
    assert "exits.py:Port, layer 2 failed while it ran: found SystemExit: 0" in one.error


@pytest.mark.parametrize("place", PLACES)
def test_port_that_changes_its_process_disturbs_no_run(
    ended: dict[str, Ended], folder: Path, place: str
) -> None:
    one = ended[f"disturbed {place}"]
    assert (one.exit_code, json.loads(one.stdout)["verdict"]) == (0, "pass"), one
    assert not list((folder / "elsewhere").iterdir())
    files = [*(folder / f"run_{place}").iterdir(), *(folder / "report").iterdir()]
    assert {"manifest.json", "layer_2.safetensors", "report.txt"} <= {path.name for path in files}
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in files)


def test_port_that_changes_its_process_is_traced_where_the_user_said(
    ended: dict[str, Ended], folder: Path
) -> None:
    assert ended["disturbed trace"].exit_code == 0, ended["disturbed trace"]
    assert [path.name for path in (folder / "traced").iterdir()] == ["layer.pt2"]


HANGING = "Path('reached').touch(); time.sleep(600)"
DEAF = "Path('reached').touch(); re.match('(a+)+b', 'a' * 60)"


@pytest.fixture
def started(forked_start: Any, small: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a run that never ends by itself, waits until its port runs, and ends what is left of it."""
    children: list[psutil.Process] = []
    with contextlib.ExitStack() as supervisors:

        def start(run: str) -> tuple[Any, psutil.Process]:
            command = layers_of(small, write_port(tmp_path / "port.py", {"run": run}), tmp_path / "capture")
            supervisor = supervisors.enter_context(forked_start(*command))
            deadline = time.monotonic() + DEADLINE_S
            while not (tmp_path / "reached").exists():
                assert not supervisor.has_ended(), "the run ended before its port ran"
                assert time.monotonic() < deadline, "the port did not run"
                time.sleep(0.05)
            (child,) = psutil.Process(supervisor.pid).children()
            children.append(child)
            return supervisor, child

        yield start
    for child in children:
        if child.is_running():
            child.kill()


def test_interrupt_reaches_the_port(started: Start) -> None:
    assert_ends_in_words(*started(HANGING), signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_termination_ends_both_processes_in_the_words_of_an_interrupt(started: Start, sent: int) -> None:
    assert_ends_in_words(*started(HANGING), sent)


def assert_ends_in_words(supervisor: Any, child: psutil.Process, sent: int) -> None:
    os.kill(supervisor.pid, sent)
    done = supervisor.wait(timeout_s=DEADLINE_S)
    assert done.returncode == 3
    assert "Error: interrupted. What was finished is kept; go on with: mm2-test multi-layer " in done.stderr
    assert not child.is_running()


@pytest.mark.slow
def test_port_that_hears_no_interrupt_is_ended_at_the_third(started: Start) -> None:
    supervisor, child = started(DEAF)
    for _ in range(3):
        os.kill(supervisor.pid, signal.SIGINT)
        time.sleep(0.5)
    done = supervisor.wait(timeout_s=DEADLINE_S)
    assert done.returncode == 3
    assert "Error: interrupted" in done.stderr
    assert not child.is_running()


@pytest.mark.slow
def test_port_dies_with_its_supervisor(started: Start) -> None:
    supervisor, child = started(DEAF)
    supervisor.kill()
    psutil.wait_procs([child], timeout=DEADLINE_S)
    assert not child.is_running()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mm2", "torchrun"])
@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            "os._exit(0) if self.ranks.rank else None",
            "exit code 0, without a verdict, while running layer 2",
        ),
        ("while self.ranks.rank: pass", "rank 1 failed: running layer 2"),
    ],
)
def test_rank_that_ends_or_hangs_fails_the_run(
    small: Path, tmp_path: Path, launcher: str, run: str, words: str
) -> None:
    port = write_port(tmp_path / "port.py", {"run": run})
    command = (*layers_of(small, port, tmp_path / "capture"), "--layer-timeout", RANK_TIMEOUT_S)
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "neuron")
    words_before = ("neuron", *command, "--tp-degree", 2) if launcher == "mm2" else (*torchrun, *command)
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words_before)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == (3 if launcher == "mm2" else 1), done.stderr
    # Each of torchrun's ranks tells of itself.
    assert (words if launcher == "mm2" else words.partition("failed: ")[2] or words) in done.stderr
    manifest = json.loads((tmp_path / "capture" / "manifest.json").read_text())
    assert manifest["complete_layers"] == [0, 1]
