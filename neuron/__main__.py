"""The console command `mm2-test` and `python -m neuron`: a supervisor, and the command in a child of it.

torch is imported in the child alone.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from neuron.process.record import StatusRecord
from neuron.process.status import RECORD_VARIABLE, run_told
from neuron.process.supervisor import supervise

_NAME = "mm2-test"


def main() -> NoReturn:
    """Run this process's command line, and exit with the code of its verdict."""
    descriptor = os.environ.pop(RECORD_VARIABLE, None)
    if descriptor is not None:
        # A rank that mm2 started: its starter supervises it.
        run_told(_run_command, StatusRecord.attach(int(descriptor)), parent=os.getppid())
    sys.exit(supervise(_run_command, sys.argv[1:]))


def _run_command() -> None:
    from neuron.cli import main as command

    command(prog_name=_NAME)


if __name__ == "__main__":
    main()
