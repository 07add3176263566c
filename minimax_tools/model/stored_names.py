"""StoredNames: the names under which a family's checkpoints store what mm2 knows by MiniMax-M2's names.

mm2 has one name for each tensor of a layer, whatever its family (`weight_names`). Only where a checkpoint is read or
written, where a port takes its weights, and where a name is shown does the family's own name count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_FULL = re.compile(r"model\.|lm_head\.")
_LAYER = re.compile(r"(model\.layers\.\d+\.)(.*)", re.DOTALL)
# Endings that a quantised weight's own tensors add to its name.
_SCALE = "_scale_inv"
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """The pairs of names of a family.

    `layer` has the stored name of each tensor whose name is another, relative to the layer, with `#` for an expert's
    number. Names that it leaves out are the same. `prefix` comes before each full name. Two names that are stored as
    one are a ValueError.
    """

    prefix: str = ""
    layer: Mapping[str, str] = field(default_factory=dict)
    _own: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        own = {stored: name for name, stored in self.layer.items()}
        if len(own) < len(self.layer):
            raise ValueError(f"two tensors are stored under one name: {self.layer}")
        object.__setattr__(self, "_own", MappingProxyType(own))

    @property
    def translates(self) -> bool:
        """True if some name is stored as another."""
        return bool(self.prefix or self.layer)

    def stored(self, name: str) -> str:
        """Return the stored name of a tensor, full or relative to its layer."""
        stored = _translate(name, self.layer)
        return self.prefix + stored if _FULL.match(name) else stored

    def own(self, stored: str) -> str:
        """Return mm2's name of a stored tensor, full or relative to its layer; unknown names stay."""
        if self.prefix and not stored.startswith(self.prefix) and _FULL.match(stored):
            # It belongs to another part of the checkpoint, such as a vision model.
            return stored
        return _translate(stored.removeprefix(self.prefix), self._own)

    def retell(self, text: str) -> str:
        """Return a text, or code, with stored names in the place of mm2's: whole ones, or a matrix as `w1`."""
        told = {pair for names in self.layer.items() for pair in _told_parts(*names)}
        for own, stored in sorted(told, reverse=True):
            text = re.sub(rf"(?<!\w){re.escape(own)}(?!\w)", stored, text)
        return text


def _told_parts(own: str, stored: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a pair of names that texts tell of: of an expert's what stands around its number."""
    (before, _, behind), (stored_before, _, stored_behind) = own.partition("#"), stored.partition("#")
    if not behind:
        yield own.removesuffix(_WEIGHT), stored.removesuffix(_WEIGHT)
        return
    yield before.removesuffix("."), stored_before.removesuffix(".")
    matrix, stored_matrix = (part.removeprefix(".").removesuffix(_WEIGHT) for part in (behind, stored_behind))
    yield matrix, stored_matrix


def _translate(name: str, names: Mapping[str, str]) -> str:
    if not names:
        return name
    match = _LAYER.fullmatch(name)
    prefix, relative = (match[1], match[2]) if match else ("", name)
    is_scale = relative.endswith(_SCALE)
    expert = _EXPERT.search(relative)
    kind = _EXPERT.sub(".experts.#.", relative.removesuffix(_SCALE))
    found = names.get(kind)
    if found is None:
        return name
    if expert is not None:
        found = found.replace("#", expert[1])
    return prefix + found + (_SCALE if is_scale else "")
