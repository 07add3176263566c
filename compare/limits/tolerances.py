"""The usual tolerances: an element is close to the golden's within atol + rtol · |golden|.

The file of mm2's own limits.
"""

from __future__ import annotations

from pathlib import Path

CALIBRATION = Path(__file__).with_name("calibration.yaml")


DEFAULT_RTOL = 1e-2
DEFAULT_ATOL = 1e-3
