"""Narration: what a verbose run tells on stderr while it loads, where nobody has set up logging."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

_PACKAGE = "minimax_tools"


@contextlib.contextmanager
def narrating(verbose: bool) -> Iterator[None]:
    """While the block lasts, show the package's log messages on stderr; not again where they are shown already."""
    logger = logging.getLogger(_PACKAGE)
    if not verbose or (logger.isEnabledFor(logging.INFO) and logger.hasHandlers()):
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    before = (logger.level, logger.propagate, list(logger.handlers))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    # Whoever listens further up would show every line again.
    logger.propagate = False
    try:
        yield
    finally:
        logger.level, logger.propagate, logger.handlers[:] = before
        logger.setLevel(before[0])
