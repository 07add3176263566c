"""Constants of the limits that options show, without the libraries that the judgement loads."""

from __future__ import annotations

from pathlib import Path

CALIBRATION = Path(__file__).with_name("calibration.yaml")  # mm2's own limits
# An element is close to the golden's within atol + rtol · |golden|.
DEFAULT_RTOL = 1e-2
DEFAULT_ATOL = 1e-3
LONGEST_CHAIN = (
    8  # layers of a chain that can be judged: behind more, right ports differ by as much as the output
)
