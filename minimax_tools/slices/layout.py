"""Layout of slices on the disk: their usual folder, and the formats of their files."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

DEFAULT_FOLDER = Path("model_shards")
PTH_FILE = "model.pth"


class FileFormat(Enum):
    """Format of a slice's weight files."""

    SAFETENSORS = "safetensors"
    PTH = "pth"
