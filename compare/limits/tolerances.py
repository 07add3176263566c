"""The usual tolerances: an element is close to the golden's within atol + rtol · |golden|."""

from __future__ import annotations

DEFAULT_RTOL = 1e-2
DEFAULT_ATOL = 1e-3
