from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from minimax_tools.json_codec import decode, encode
from minimax_tools.ranks.watch import Process


def test_process_that_ended_is_gone_and_a_living_one_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = replace(Process.current(), pid=child.pid)
        assert not process.is_gone
        child.kill()
        # Nobody waited for it yet: what is left of it does not count.
        while not process.is_gone:
            pass
    assert process.is_gone


def test_nothing_is_known_of_a_process_on_another_machine() -> None:
    assert not Process(pid=2**22 + 1, place="elsewhere").is_gone


def test_what_is_told_of_a_process_names_it() -> None:
    assert decode(Process, encode(Process.current())) == Process.current()
