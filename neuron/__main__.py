"""The console command `mm2-test` and `python -m neuron`: a supervisor, which runs the command in a child process.

Only the child imports torch.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from neuron.process.record import StatusRecord
from neuron.process.status import RECORD_VARIABLE, run_supervised
from neuron.process.supervisor import supervise

_NAME = "mm2-test"


def main() -> NoReturn:
    """Run this process's command line, and exit with the code of its verdict."""
    descriptor = os.environ.pop(RECORD_VARIABLE, None)
    if descriptor is not None:
        # This process is a rank: `launch_ranks` started it, and supervises it by the record. The call does not return.
        run_supervised(_run_command, StatusRecord.attach(int(descriptor)), parent=os.getppid())
    sys.exit(supervise(_run_command, sys.argv[1:]))


def _run_command() -> None:
    from neuron.cli import main as run_mm2_test

    run_mm2_test(prog_name=_NAME)


if __name__ == "__main__":
    main()
