"""Modes of NxD: its module `utils`."""

from __future__ import annotations

import os


def cpu_mode():
    """Return whether the layers compute on the CPU."""
    return os.environ.get("NXD_CPU_MODE") == "1"
