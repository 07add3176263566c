"""Naming: which mistake the diagnosis names for a layer of which it sees the output alone."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from faults.judging import as_black_box
from faults.scene import Scene
from minimax_tools.capture.reader import Capture

_LIBRARY = "compare.diagnosis"

Named = tuple[tuple[str, Mapping[str, Any]], ...]


def can_name() -> bool:
    """Whether there is a diagnosis to ask."""
    return importlib.util.find_spec(_LIBRARY) is not None


def name_mistake(scene: Scene, capture: Capture, layer: int) -> Named:
    """The mistakes that explain a layer's output, with their parameters, best first; empty where none does."""
    library = importlib.import_module(f"{_LIBRARY}.diagnose")
    diagnosis = library.diagnose(scene.golden, as_black_box(capture), model=scene.folder, layers=(layer,))
    return tuple((finding.mistake, dict(finding.parameters)) for finding in diagnosis.findings)
