"""Naming: which mistake the diagnosis names for a layer of which it sees the output alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compare.diagnosis.diagnose import diagnose
from faults.scene import Scene
from faults.views import as_black_box
from minimax_tools.capture.reader import Capture

Named = tuple[tuple[str, Mapping[str, Any]], ...]


def name_mistake(scene: Scene, capture: Capture, layer: int) -> Named:
    """The mistakes that explain a layer's output, with their parameters, best first; empty where none does."""
    diagnosis = diagnose(scene.golden, as_black_box(capture), model=scene.folder, layers=(layer,))
    return tuple((finding.mistake, dict(finding.parameters)) for finding in diagnosis.findings)
