"""The border to a port's own code, in which anything can happen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minimax_tools.errors import Mm2Error, TargetError
from neuron.process.status import doing


class PortEndError(TargetError):
    """Code of a port's tried to exit, or asked for more memory than there is: that ends every run."""


@contextmanager
def own_code(failed: str, *, activity: str, next_step: str) -> Iterator[None]:
    """Run code of a port's: what it raises becomes one error that says where; an error of mm2's own stays.

    A port that exits is caught too: its exit code would stand for a verdict that nobody reached. Where it ends the
    process, whoever supervises that knows from `activity` where it was.

    Args:
        failed: What failed, and where, as in "target port.py:Layer, layer 3 failed while it ran".
        activity: What the code does, and where, as in "running layer 3 of target port.py:Layer".
        next_step: What the reader should do.

    Raises:
        TargetError: The code raised.
        PortEndError: It tried to exit, or found no memory.
    """
    try:
        with doing(activity):
            yield
    except (Mm2Error, KeyboardInterrupt):
        raise
    except BaseException as error:  # one that exits, or raises what nobody catches, too
        kind = PortEndError if isinstance(error, (SystemExit, MemoryError)) else TargetError
        raise kind(failed, found=f"{type(error).__name__}: {error}", next_step=next_step) from error
