"""The console command `mm2-test` and `python -m neuron`: a supervisor, which runs the command in a child process.

Only the child imports torch.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from minimax_tools.command_line.group import begin

_NAME = "mm2-test"


def main() -> NoReturn:
    """Run this process's command line, and exit with the code of its verdict."""
    words = (_NAME, *sys.argv[1:])
    begin(words)
    from minimax_tools.command_line.console import print_error
    from minimax_tools.machine.stops import die_when_stopped
    from neuron.process.record import StatusRecord
    from neuron.process.status import RECORD_VARIABLE, run_supervised
    from neuron.process.supervisor import supervise

    descriptor = os.environ.pop(RECORD_VARIABLE, None)
    if descriptor is not None:
        # This process is a rank: `launch_ranks` started it, supervises it by the record, and tells of a stop until the
        # command is loaded. The call does not return.
        die_when_stopped()
        run_supervised(_run_command, StatusRecord.attach(int(descriptor)), parent=os.getppid())
    sys.exit(supervise(_run_command, words, print_error=print_error))


def _run_command() -> None:
    from minimax_tools.machine.stops import raise_when_stopped
    from neuron.cli import main as run_mm2_test

    # `obj` is called once the command's libraries are loaded.
    run_mm2_test(prog_name=_NAME, obj=raise_when_stopped)


if __name__ == "__main__":
    main()
