"""Native output: what C++ libraries write to standard output past Python, kept from where results belong."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
