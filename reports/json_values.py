"""JSON values of reports: plain JSON that every parser reads, without NaN and Infinity.

Reports are not read back; what mm2 reads again is written by `minimax_tools.json_codec`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def to_json(value: object) -> Any:
    """Convert a value to what `json.dumps` takes.

    Dataclasses become objects, tuples lists, enums their values, infinities `"inf"` or `"-inf"`, NaN null. Any other
    value is returned as it is.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else f"{value:g}"
    return value
