"""Ports that end the process that runs them, or never end: each is a failed run that says where, and no verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

REPOSITORY = Path(__file__).parents[2]
# Processes import torch, on a machine that may have much else to do.
DEADLINE_S = 300

PORT = """
import atexit, ctypes, os, re, signal, sys, threading, time
import torch
from minimax_tools.reference.layer import ReferenceLayer

class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.layer = layer_idx
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

# Runs several commands, each supervised as from a shell, in a process that imports torch once for all.
SUPERVISED = """
import json, os, sys, tempfile
from neuron.cli import main
from neuron.process.supervisor import supervise
kept, done = [os.dup(1), os.dup(2)], []
for arguments in json.loads(sys.stdin.read()):
    files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
    for number, file in zip((1, 2), files):
        os.dup2(file.fileno(), number)
    sys.argv = ["mm2-test", *arguments]
    exit_code = supervise(main, arguments)
    sys.stdout.flush(), sys.stderr.flush()
    texts = []
    for number, (file, original) in enumerate(zip(files, kept)):
        os.dup2(original, number + 1)
        file.seek(0)
        texts.append(file.read().decode())
    done.append([exit_code, *texts])
print(json.dumps(done))
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        (line,) = (line for line in self.stderr.splitlines() if line.startswith("Error: "))
        return line.removeprefix("Error: ")


Write = Callable[..., str]
Supervised = Callable[..., list[Ended]]


@pytest.fixture
def write_dying(tmp_path: Path) -> Write:
    """Writes a port that does something at one place, and gives its `--target`."""

    def write(name: str, **places: str) -> str:
        code = dict.fromkeys(("built", "converted", "asked", "run"), "pass") | {"imported": ""} | places
        (tmp_path / f"{name}.py").write_text(PORT.format(**code))
        return f"{tmp_path / name}.py:Port"

    return write


@pytest.fixture
def supervised(tmp_path: Path) -> Supervised:
    def run(commands: Sequence[Sequence[object]]) -> list[Ended]:
        done = subprocess.run(
            [sys.executable, "-c", SUPERVISED],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            input=json.dumps([[str(word) for word in words] for words in commands]),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [
            Ended(exit_code=exit_code, stdout=stdout, stderr=stderr)
            for exit_code, stdout, stderr in json.loads(done.stdout)
        ]

    return run


@pytest.fixture
def layers_of(small: Path, tmp_path: Path) -> Callable[..., tuple[object, ...]]:
    """The command that runs three layers of a target."""

    def command(target: str, *arguments: object) -> tuple[object, ...]:
        folder = tmp_path / "captures" / Path(target).stem.partition(":")[0]
        common = ("--model", small, "--seq-len", "12,7", "--backend", "cpu")
        words = ("multi-layer", "--layers", "0:3", *common, "--target", target)
        return (*words, "--output-dir", folder, *arguments)

    return command


# By name: where the port does it, how, and what the error must say.
ENDS = {
    "import_exit_0": ({"imported": "os._exit(0)"}, ("exit code 0", "while importing target")),
    "init_exit_0": ({"built": "os._exit(0)"}, ("exit code 0", "while building layer 0 of target")),
    "convert_exit_0": (
        {"converted": "os._exit(0)"},
        ("exit code 0", "while converting the weights of layer 0"),
    ),
    "forward_exit_0": ({"run": "os._exit(0)"}, ("exit code 0", "while running layer 2 of target")),
    "forward_exit_1": ({"run": "os._exit(1)"}, ("exit code 1", "while running layer 2 of target")),
    "forward_exec": ({"run": "os.execv('/bin/true', ['true'])"}, ("exit code 0", "while running layer 2")),
    "state_dict_exit": ({"asked": "sys.exit(0)"}, ("exit", "layer 0")),
    "abort": ({"run": "os.abort()"}, ("SIGABRT", "while running layer 2", "in forward (")),
    "segfault": ({"run": "ctypes.string_at(0)"}, ("SIGSEGV", "while running layer 2", "called by forward (")),
    "killed": (
        {"run": "os.kill(os.getpid(), signal.SIGKILL)"},
        ("SIGKILL", "memory ran out", "while running layer 2"),
    ),
    "memory_error": ({"run": "bytearray(1 << 62)"}, ("MemoryError", "layer 2")),
    "thread": (
        {"run": "threading.Timer(0.2, os._exit, [0]).start(); time.sleep(60)"},
        ("exit code 0", "while running layer 2"),
    ),
    "closed_files": ({"run": "os.closerange(3, 256); os._exit(0)"}, ("exit code 0", "while running layer 2")),
    "loop": ({"run": "while True: pass"}, ("running layer 2", "took more than 2 s", "in forward (")),
    "native_loop": (
        {"run": "re.match('(a+)+b', 'a' * 60)"},
        ("running layer 2", "took more than 2 s", "--layer-timeout"),
    ),
}
LIMIT = ("--layer-timeout", 2)


def test_no_end_of_a_port_is_a_verdict_and_each_says_where(
    supervised: Supervised, write_dying: Write, layers_of: Any, tmp_path: Path
) -> None:
    commands = [
        layers_of(write_dying(name, **places), "--json", *LIMIT) for name, (places, _) in ENDS.items()
    ]
    for (name, (_, words)), ended in zip(ENDS.items(), supervised(commands), strict=True):
        assert ended.exit_code == 3, (name, ended)
        assert f"{name}.py" in ended.error
        assert [word for word in words if word not in ended.error] == [], ended.error
        # Whole, and the only thing there.
        record = json.loads(ended.stdout)
        assert (record["verdict"], record["exit_code"], record["error"]) == ("incomparable", 3, ended.error)
        if "run" in ENDS[name][0]:
            manifest = json.loads((tmp_path / "captures" / name / "manifest.json").read_text())
            assert manifest["complete_layers"] == [0, 1], name


def test_layers_before_the_end_are_kept_and_gone_on_with(
    supervised: Supervised, write_dying: Write, layers_of: Any, tmp_path: Path
) -> None:
    once = "Path = __import__('pathlib').Path; Path('died').exists() or (Path('died').touch(), os._exit(0))"
    command = layers_of(write_dying("once", run=once))
    died, resumed = supervised([command, command])
    assert (died.exit_code, resumed.exit_code) == (3, 0)
    assert "Layers that are stored are kept" in died.error
    assert "after layer 1" in resumed.stderr
    manifest = json.loads((tmp_path / "captures" / "once" / "manifest.json").read_text())
    assert manifest["complete_layers"] == [0, 1, 2]
