"""Ports that end the process that runs them, or never end.

Each is mm2's reference layer with one line of code in one place. Code in `forward` runs in layer 2 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The layer whose forward dies.
LAYER = 2

# Names in braces are places, except `layer`. Places without code get `pass`. Code can ask `self.ranks.rank`.
_PORT = """
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
        if self.layer == {layer}:
            {run}
        return super().forward(*args)

{imported}
"""
_PLACES = ("imported", "built", "converted", "asked", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A way in which a port ends its process."""

    name: str  # name of the death and of the port's file
    place: str  # place of the code: imported, built, converted, asked (for its state_dict) or run
    code: str  # one line of Python
    words: tuple[str, ...]  # words that mm2's error must contain, beside target and layer
    is_endless: bool = False  # whether only a time limit ends it

    @property
    def is_in_forward(self) -> bool:
        """True if it dies in `forward`: so earlier layers have run before."""
        return self.place == "run"

    def write(self, folder: Path) -> str:
        """Write the port into a folder, and return its `--target`."""
        return write_port(folder / f"{self.name}.py", {self.place: self.code})


def write_port(path: Path, code: Mapping[str, str]) -> str:
    """Write a port with a line of code at each of some `_PLACES`, and return its `--target`."""
    lines = {**dict.fromkeys(_PLACES, "pass"), **code}
    path.write_text(_PORT.format(layer=LAYER, **lines), encoding="utf-8")
    return f"{path}:Port"


def _death(name: str, place: str, code: str, *words: str) -> Death:
    return Death(name=name, place=place, code=code, words=words)


def _endless(name: str, code: str, *words: str) -> Death:
    return Death(name=name, place="run", code=code, words=words, is_endless=True)


# Closes all files but what gloo's thread waits on: without that the thread aborts, at times before the exit.
_CLOSES_FILES = (
    "[os.closerange(n, n + 1) for n in range(3, 99) if 'poll' not in os.path.realpath(f'/proc/self/fd/{n}')]"
)

DEATHS = (
    _death("import_exit_0", "imported", "os._exit(0)", "exit code 0", "while importing port"),
    _death("import_raises_exit", "imported", "sys.exit(0)", "SystemExit", "cannot be imported"),
    _death("init_exit_0", "built", "os._exit(0)", "exit code 0", "while building"),
    _death("convert_exit_0", "converted", "os._exit(0)", "exit code 0", "while converting the weights"),
    _death("state_dict_exits", "asked", "sys.exit(0)", "exit"),
    _death("forward_raises_exit", "run", "sys.exit(0)", "SystemExit"),
    _death("forward_exit_0", "run", "os._exit(0)", "exit code 0", "while running"),
    _death("forward_exit_1", "run", "os._exit(1)", "exit code 1", "while running"),
    _death("exec", "run", "os.execv('/bin/true', ['true'])", "exit code 0", "while running"),
    _death("thread", "run", "threading.Timer(0.1, os._exit, [0]).start(); time.sleep(60)", "exit code 0"),
    _death("files_closed", "run", f"{_CLOSES_FILES}; os._exit(0)", "exit code 0", "while running"),
    _death("abort", "run", "os.abort()", "SIGABRT", "while running", "in forward ("),
    _death("segfault", "run", "ctypes.string_at(0)", "SIGSEGV", "while running", "called by forward ("),
    _death("killed", "run", "os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", "memory ran out"),
    _death("memory_error", "run", "bytearray(1 << 62)", "MemoryError"),
    _endless("loop", "while True: pass", "running", "took more than", "in forward ("),
    # This match holds the interpreter's lock: no Python code beside it runs.
    _endless("native_loop", "re.match('(a+)+b', 'a' * 60)", "running", "took more than"),
)
