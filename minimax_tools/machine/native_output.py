"""Output that is no result: what libraries and ports write to standard output, kept from where results belong."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def native_output_dropped() -> Iterator[None]:
    """Drop what reaches standard output in the block: gloo greets its peers there; its errors are exceptions."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def output_set_aside() -> Iterator[None]:
    """Send to standard error what reaches standard output in the block: a port prints, a compiler tells of itself."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
