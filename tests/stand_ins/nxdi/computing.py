"""The device that NxD computes on."""

from __future__ import annotations

import os


def cpu_mode():
    """Decide whether modules are built for the CPU."""
    return os.environ.get("NXD_CPU_MODE", "0") != "0"
