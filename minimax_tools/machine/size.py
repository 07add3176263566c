"""Sizes in bytes, read from and written as text: `12GB` is 12 · 10⁹ bytes, `12GiB` is 12 · 2³⁰."""

from __future__ import annotations

import re
from fractions import Fraction

_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_UNITS = {unit.upper(): 1000**power for power, unit in enumerate(_DECIMAL)} | {
    unit: 1024**power for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB", "PIB"), start=1)
}
_SIZE = re.compile(rf"([0-9]+(?:\.[0-9]+)?)\s*({'|'.join(_UNITS)})", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the whole bytes of a size such as `12GB`, `40 GiB` or `1.5TB`, in any case.

    Raises:
        ValueError: `text` is not a number with a unit. A bare number is refused: its unit would be a guess.
    """
    size = _SIZE.fullmatch(text.strip())
    if size is None:
        raise ValueError(
            f"{text!r} is not a size: expected a number and a unit, for example 500MB, 2GB or 64MiB"
        )
    return int(Fraction(size[1]) * _UNITS[size[2].upper()])


def format_size(num_bytes: int) -> str:
    """Return a size as text, in the largest decimal unit that gives at least 1: `12.3 GB`, `999 B`."""
    value, unit = float(num_bytes), _DECIMAL[0]
    for unit in _DECIMAL:
        # Rounded as it is printed: 999.96 MB is 1.0 GB, not 1000.0 MB.
        if abs(round(value, 1)) < 1000 or unit == _DECIMAL[-1]:
            break
        value /= 1000
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
