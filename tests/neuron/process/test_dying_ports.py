"""Ports that end the process that runs them, or never end: each is a failed run that says where, and no verdict."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

# Processes import torch, on a machine that may have much else to do.
DEADLINE_S = 300
# A layer of the small model takes milliseconds; beside much other work, or as ranks, it takes seconds.
LAYER_TIMEOUT_S = 6
RANK_TIMEOUT_S = 60

# mm2's reference layer with one line of code at some places, in braces. Places without code get `pass`. Code in
# `forward` runs in layer 2 alone. Code can ask `self.ranks.rank`.
PORT = """
import atexit, ctypes, os, re, signal, sys, threading, time
from pathlib import Path
import torch
from minimax_tools.reference.layer import ReferenceLayer

class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.layer, self.ranks = layer_idx, config.ranks
        {built}

    def convert_state_dict(self, tensors, config, layer_idx):
        {converted}
        return dict(tensors)

    def state_dict(self, *args, **kwargs):
        {asked}
        return super().state_dict(*args, **kwargs)

    def forward(self, *args):
        if self.layer == 2:
            {run}
        return super().forward(*args)

{imported}
"""
# Closes all files but what gloo's thread waits on: without that the thread aborts, at times before the exit.
CLOSES_FILES = (
    "[os.closerange(n, n + 1) for n in range(3, 99) if 'poll' not in os.path.realpath(f'/proc/self/fd/{n}')]"
)
# By name: the place of the code, the code, and words that mm2's error must contain, beside target and layer.
DEATHS = {
    "import_exit_0": ("imported", "os._exit(0)", ("exit code 0", "while importing port")),
    "import_raises_exit": ("imported", "sys.exit(0)", ("SystemExit", "cannot be imported")),
    "init_exit_0": ("built", "os._exit(0)", ("exit code 0", "while building")),
    "convert_exit_0": ("converted", "os._exit(0)", ("exit code 0", "while converting the weights")),
    "state_dict_exits": ("asked", "sys.exit(0)", ("exit",)),
    "forward_raises_exit": ("run", "sys.exit(0)", ("SystemExit",)),
    "forward_exit_0": ("run", "os._exit(0)", ("exit code 0", "while running")),
    "forward_exit_1": ("run", "os._exit(1)", ("exit code 1", "while running")),
    "exec": ("run", "os.execv('/bin/true', ['true'])", ("exit code 0", "while running")),
    "thread": ("run", "threading.Timer(0.1, os._exit, [0]).start(); time.sleep(60)", ("exit code 0",)),
    "files_closed": ("run", f"{CLOSES_FILES}; os._exit(0)", ("exit code 0", "while running")),
    "abort": ("run", "os.abort()", ("SIGABRT", "while running", "in forward (")),
    "segfault": ("run", "ctypes.string_at(0)", ("SIGSEGV", "while running", "called by forward (")),
    "killed": ("run", "os.kill(os.getpid(), signal.SIGKILL)", ("SIGKILL", "memory ran out")),
    "memory_error": ("run", "bytearray(1 << 62)", ("MemoryError",)),
    "loop": ("run", "while True: pass", ("running", "took more than", "in forward (")),
    # This match holds the interpreter's lock: no Python code beside it runs.
    "native_loop": ("run", "re.match('(a+)+b', 'a' * 60)", ("running", "took more than")),
}
ENDLESS = ("loop", "native_loop")

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
ENDS = ("exit code 0, without a verdict, while running ", "port.py:Port")
EVERY_COMMAND = {
    **dict.fromkeys(("bisect", "sweep", "component", "full", "trace", "weights"), ENDS),
    "weights exits": ("exits.py:Port, layer 2 failed while it ran: found SystemExit: 0",),
}


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


def write_port(path: Path, code: Mapping[str, str]) -> str:
    """Write a port with a line of code at each of some places, and return its `--target`."""
    lines = {**dict.fromkeys(("imported", "built", "converted", "asked", "run"), "pass"), **code}
    path.write_text(PORT.format(**lines), encoding="utf-8")
    return f"{path}:Port"


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
    for name, (place, code, _) in DEATHS.items():
        command = layers_of(small, write_port(folder / f"{name}.py", {place: code}), folder / name)
        limit = ("--layer-timeout", LAYER_TIMEOUT_S) if name in ENDLESS else ()
        commands[name] = (*command, "--json", *limit)
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
    places = dict.fromkeys(PLACES, DISTURBING.format(folder=str(folder / "elsewhere")))
    write_port(folder / "disturbing.py", places)
    model, golden = (Path(os.path.relpath(path, folder)) for path in (small_fp8, small_golden))
    disturbing = ("--target", "disturbing.py:Port", "--model", model)
    commands["disturbed sweep"] = (
        # The port disturbs in layer 2; layer 3 runs after it.
        *("sweep", *disturbing, "--golden", golden, "--layers", "2:4", "--sites", "component"),
        *("--backend", "cpu", "--output-dir", "run", "--report-path", "report", "--json"),
    )
    trace = ("trace", *disturbing, "--layer", 1, "--output", "traced/layer.pt2", "--json")
    commands["disturbed trace"] = trace
    done = forked_python(
        SUPERVISED,
        folder=folder,
        standard_input=json.dumps({name: [str(word) for word in words] for name, words in commands.items()}),
    )
    assert done.returncode == 0, done.stderr
    return {name: Ended(**how) for name, how in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", DEATHS)
def test_no_end_of_a_port_is_a_verdict_and_each_says_where(
    ended: dict[str, Ended], folder: Path, name: str
) -> None:
    one, (place, _, words) = ended[name], DEATHS[name]
    assert one.exit_code == 3, one
    assert f"{name}.py" in one.error
    assert [word for word in words if word not in one.error] == [], one.error
    # Whole, and the only thing there.
    record = json.loads(one.stdout)
    assert (record["verdict"], record["exit_code"], record["error"]) == ("incomparable", 3, one.error)
    if place == "run":
        assert "layer 2" in one.error
        manifest = json.loads((folder / name / "manifest.json").read_text())
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
    assert [words for words in (*EVERY_COMMAND[name], "layer 2") if words not in one.error] == [], one.error


def test_port_that_changes_its_process_everywhere_disturbs_no_run(
    ended: dict[str, Ended], folder: Path
) -> None:
    one = ended["disturbed sweep"]
    assert (one.exit_code, json.loads(one.stdout)["verdict"]) == (0, "pass"), one
    assert not list((folder / "elsewhere").iterdir())
    files = [*(folder / "run").iterdir(), *(folder / "report").iterdir()]
    assert {"manifest.json", "layer_2.safetensors", "report.txt"} <= {path.name for path in files}
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in files)
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


@pytest.mark.parametrize(
    ("run", "sent"),
    [
        (HANGING, [signal.SIGINT]),
        pytest.param(HANGING, [signal.SIGTERM], marks=pytest.mark.slow),
        pytest.param(HANGING, [signal.SIGHUP], marks=pytest.mark.slow),
        # Such a port hears no interrupt, and is ended at the third.
        pytest.param(DEAF, [signal.SIGINT] * 3, marks=pytest.mark.slow),
    ],
)
def test_signal_ends_both_processes_in_the_words_of_an_interrupt(
    started: Start, run: str, sent: list[signal.Signals]
) -> None:
    supervisor, child = started(run)
    for number in sent:
        os.kill(supervisor.pid, number)
        time.sleep(0.5 if run == DEAF else 0)
    done = supervisor.wait(timeout_s=DEADLINE_S)
    assert done.returncode == 3
    assert "Error: interrupted" in done.stderr
    if run == HANGING:
        assert "What was finished is kept; go on with: mm2-test multi-layer " in done.stderr
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
        ("os._exit(0) if self.ranks.rank else None", "exit code 0, without a verdict, while running layer 2"),
        ("while self.ranks.rank: pass", "rank 1 failed: running layer 2"),
    ],
)
def test_rank_that_ends_or_hangs_fails_the_run(
    process: Any, torchrun: Any, small: Path, tmp_path: Path, launcher: str, run: str, words: str
) -> None:
    port = write_port(tmp_path / "port.py", {"run": run})
    command = (*layers_of(small, port, tmp_path / "capture"), "--layer-timeout", RANK_TIMEOUT_S)
    is_mm2 = launcher == "mm2"
    done = process(*command, "--tp-degree", 2) if is_mm2 else torchrun("-m", "neuron", *command)
    assert done.returncode == (3 if is_mm2 else 1), done.stderr
    # Each of torchrun's ranks tells of itself.
    assert (words if is_mm2 else words.partition("failed: ")[2] or words) in done.stderr
    manifest = json.loads((tmp_path / "capture" / "manifest.json").read_text())
    assert manifest["complete_layers"] == [0, 1]
