"""Restricted loading of captures: reads what torch.save wrote, without running anything in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minimax_tools.errors import CaptureError
from minimax_tools.torch_files.torch_file import read_value, refusing


def load_restricted(path: Path) -> Any:
    """What torch.save wrote to `path`: CPU tensors, containers and numbers; the rest as `InertRecord`s.

    Raises:
        CaptureError: The file is missing, cut short, damaged, or not one of torch.save's.
    """
    next_step = "Copy it again from the host that wrote it, or run the capture again."
    with refusing(path, CaptureError, next_step=next_step):
        return read_value(path)
