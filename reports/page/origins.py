"""Origins: the provenance of both sides of a comparison, row by row, with differences marked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minimax_tools.capture.source import CaptureSource
from minimax_tools.json_codec import encode
from minimax_tools.model.sites import find_level

# Characters of a value; a longer one is cut in the middle.
_LONGEST = 120
_CUT = "…"
# Digests of every layer of the checkpoint: layers of another model are refused before anything is compared.
_LEFT_OUT = ("model.layers", "model.layer_tensors")
_DIGEST = re.compile("[0-9a-f]{40,}")
_SHOWN_OF_DIGEST = 16
_ABSENT = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginRow:
    """Row of the table: one value of both sides' provenance."""

    name: str
    golden: str
    port: str

    @property
    def differs(self) -> bool:
        """True if the sides have different values."""
        return self.golden != self.port


def origin_rows(reference: CaptureSource, target: CaptureSource) -> tuple[OriginRow, ...]:
    """Return the provenance of both sides; a side that does not tell a value has a dash."""
    golden, port = (dict(_values(side)) for side in (reference, target))
    names = list(dict.fromkeys((*golden, *port)))
    return tuple(
        OriginRow(name=name, golden=_cut(golden.get(name, _ABSENT)), port=_cut(port.get(name, _ABSENT)))
        for name in names
    )


def _values(side: CaptureSource) -> Iterator[tuple[str, str]]:
    yield "folder", str(side.directory)
    yield "complete", "yes" if side.is_complete else "no: the run stopped"
    yield "certified", _word_certificate(side)
    if side.digest_note:
        yield "digests", side.digest_note
    for name, dtype in side.observed_dtypes.items():
        yield f"loaded dtype of {name}", dtype
    description = side.known_description
    if description is not None:
        yield from _flat(encode(description))


def _word_certificate(side: CaptureSource) -> str:
    if side.certificate is None:
        return "no"
    return "void: changed since" if side.has_void_certificate else "yes"


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names and values; `provenance.` is left out of the names."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if name in _LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, "" if name == "provenance" else f"{name}.")
        else:
            yield name, _word(value)


def _word(value: Any) -> str:
    if value is None:
        return _ABSENT
    if isinstance(value, str):
        return value[:_SHOWN_OF_DIGEST] + _CUT if _DIGEST.fullmatch(value) else value or _ABSENT
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        if find_level(value) == "all":
            return "all"
        return ", ".join(value) or _ABSENT
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else text[:half] + _CUT + text[-half:]
