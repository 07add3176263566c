"""The file of mm2's own limits."""

from __future__ import annotations

from pathlib import Path

CALIBRATION = Path(__file__).with_name("calibration.yaml")
