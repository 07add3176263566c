"""Translation of errors raised by a port's code."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minimax_tools.errors import Mm2Error, TargetError
from neuron.devices.device_memory import LOWER, is_out_of_device_memory, shorten
from neuron.process.status import doing

# Folders of libraries, of Python itself, and of mm2's packages: a port's own code lies in none of them.
_INSTALLED = {"site-packages", "dist-packages"}
_FOLDERS = (
    Path(os.__file__).parent,
    *(Path(__file__).parents[2] / name for name in ("neuron", "minimax_tools", "compare", "gpu_reference")),
)


class PortEndError(TargetError):
    """A port's attempt to exit, or its lack of memory. A caller that survives other errors of a port lets this pass."""


@contextmanager
def port_errors(failed: str, *, activity: str, next_step: str) -> Iterator[None]:
    """Turn any error of a port's code into a `TargetError`; errors of mm2 pass.

    `SystemExit` is caught too: a port's exit code must not be read as a verdict. If the port kills the process,
    the supervisor reads `activity`.

    Args:
        failed: Failure and location, such as "port port.py:Layer, layer 3 failed while it ran".
        activity: Work in progress, such as "running layer 3 of port port.py:Layer".
        next_step: The next step for the user.

    Raises:
        TargetError: The code raised.
        PortEndError: The code tried to exit, or ran out of memory.
    """
    try:
        with doing(activity):
            yield
    except (Mm2Error, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit and classes that no handler knows
        if is_out_of_device_memory(error):
            raise PortEndError(
                f"{failed}: the device is out of memory", found=shorten(error), next_step=LOWER
            ) from error
        kind = PortEndError if isinstance(error, (SystemExit, MemoryError)) else TargetError
        found = f"{type(error).__name__}: {error}{_place(error)}"
        raise kind(failed, found=found, next_step=next_step) from error


def _place(error: BaseException) -> str:
    """Return the innermost line of the port's own code that an error passed, as `, at port.py:57`; empty if none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if (
            path.is_file()
            and not any(map(path.is_relative_to, _FOLDERS))
            and not _INSTALLED & set(path.parts)
        ):
            return f", at {path.name}:{frame.lineno}"
    return ""
