"""Importing: libraries are imported without collections of garbage, and later collections pass over them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage in a block that imports libraries, and spare what it imported later collections.

    Modules are never garbage. Looking through those of torch and torch_xla takes up to half a second each time.
    """
    num_modules, is_enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # A block that imported nothing freezes nothing: garbage of a long-lived process would stay with it.
        if len(sys.modules) > num_modules:
            gc.freeze()
        if is_enabled:
            gc.enable()
