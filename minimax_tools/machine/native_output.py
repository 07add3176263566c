"""Standard output kept free of what libraries and ports print, because mm2's results go there.

Compiled code writes to file descriptor 1, past `sys.stdout`. So the descriptor itself is replaced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def native_output_dropped() -> Iterator[None]:
    """Drop standard output in the block, such as gloo's greetings. Errors of gloo are exceptions, so none is lost."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    try:
        with _output_sent_to(null_device):
            yield
    finally:
        os.close(null_device)


@contextmanager
def output_set_aside() -> Iterator[None]:
    """Redirect standard output to standard error in the block, for what ports and compilers print."""
    standard_error = 2
    with _output_sent_to(standard_error), redirect_stdout(sys.stderr):
        yield


@contextmanager
def _output_sent_to(descriptor: int) -> Iterator[None]:
    sys.stdout.flush()
    saved_output = os.dup(1)
    os.dup2(descriptor, 1)
    try:
        yield
    finally:
        os.dup2(saved_output, 1)
        os.close(saved_output)
