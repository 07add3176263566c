"""Entry: a command of mm2 begun as a process. Streams and signals are in order before a library is loaded.

At the top it imports nothing that takes time: until `begin`, a stop is told by Python, in its own words.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
from collections.abc import Sequence


def run_command(program: str, module: str, name: str = "main", further: tuple[str, ...] = ()) -> None:
    """Run the click command `name` of a module as `program`; `further` stands before the words of the command line.

    Until the command's work is loaded, which may take seconds, a stop ends the process in words.
    """
    begin((program, *sys.argv[1:]))
    from minimax_tools.command_line.stops import raise_when_stopped

    command = getattr(importlib.import_module(module), name)
    # `obj` is called once the work is loaded.
    command([*further, *sys.argv[1:]], prog_name=program, obj=raise_when_stopped)


def begin(words: Sequence[str]) -> None:
    """Begin a command, whose line is `words`; until `raise_when_stopped`, a stop ends the process in words."""
    stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    from minimax_tools.command_line.console import print_error
    from minimax_tools.command_line.given_line import asks_for_json
    from minimax_tools.command_line.stops import end_when_stopped, ignore_stops, stopped_error
    from minimax_tools.command_line.streams import OutputError, require_streams

    as_json = asks_for_json(words)
    # Registered first, this is called last: what is done is told, and a stop must not replace the exit code.
    atexit.register(ignore_stops)
    # Nothing was done yet: no command would go on from it.
    end_when_stopped(lambda: print_error(stopped_error(words, resumes=False), as_json=as_json))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
    try:
        require_streams()
    except OutputError as error:
        sys.exit(print_error(error, as_json=False))
    # torch reads this when it is loaded: threads of compiled code must sleep while they wait. If they spin, they take
    # the cores of threads that read and of other processes: beside one, 8.5 s of processor time became 55 s.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
