"""Processes of which something becomes at a certain moment: when one of their files has got its name.

A test that waits for a file and then acts loses where the process is quicker. Python tells of every rename and of every
file that is opened (audit events), so the process itself acts.
"""

from __future__ import annotations

import sys

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"

_PROGRAM = """
import os, runpy, signal, sys, time
name, act, package, *words = sys.argv[1:]
is_there = False

def hear(event, arguments):
    global is_there, name
    # A rename is announced before it is done; the folder is opened afterwards, to be flushed.
    if event == "os.rename" and name and os.path.basename(os.fsdecode(arguments[1])) == name:
        is_there = True
    elif is_there and event == "open":
        is_there, name = False, ""
        exec(act)

sys.addaudithook(hear)
sys.argv = [package, *words]
runpy.run_module(package, run_name="__main__", alter_sys=True)
"""


def words_of(package: str, *, name: str, act: str) -> list[str]:
    """The words that run a package's program, and the statements `act` once its file `name` is there."""
    return [sys.executable, "-c", _PROGRAM, name, act, package]


def of_rank(rank: int, act: str) -> str:
    """Statements that only one rank carries out, and only the first time that torchrun starts it."""
    this = "(os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'])"
    return f"if {this} == ('{rank}', '0'): {act}"
