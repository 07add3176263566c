"""ModuleNames: how the names of a checkpoint relate to a module's, and where each tensor belongs.

They differ in three ways: in the prefix (`h.0.…` for `transformer.h.0.…`), in what a block is called
(`block_sparse_moe` for `mlp`), and in the experts, which the checkpoint keeps one by one and the module in
grouped storage: `gate_up_proj` [E,2·I,H], gate rows first, and `down_proj` [E,H,I].
E experts, I intermediate, H hidden.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

SCALE_ENDING = "_scale_inv"
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")
# Where the rows of an expert's matrix go: the grouped tensor, and which half of its rows.
_GATE, _UP, _DOWN = ("gate_up_proj", "gate"), ("gate_up_proj", "up"), ("down_proj", None)
_MATRICES: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {"w1": _GATE, "gate_proj": _GATE, "w3": _UP, "up_proj": _UP, "w2": _DOWN, "down_proj": _DOWN}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A parameter or persistent buffer of a module, still without data."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """What it will take."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlace:
    """Where a stored tensor goes: a whole slot, or an expert's rows in a grouped one.

    Args:
        slot: Name of the slot.
        expert: The expert, first dim of a grouped slot; None for a whole slot.
        half: `gate` or `up`: the first or the second half of the expert's rows; None for all of them.
    """

    slot: str
    expert: int | None = None
    half: str | None = None

    def shape_in(self, slot: Slot) -> tuple[int, ...]:
        """The shape of what belongs here."""
        if self.expert is None:
            return slot.shape
        rows = slot.shape[1] if self.half is None else slot.shape[1] // 2
        return (rows, *slot.shape[2:])

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """The part of the slot's tensor that is this place."""
        if self.expert is None:
            return storage
        matrix = storage[self.expert]
        if self.half is None:
            return matrix
        middle = matrix.shape[0] // 2
        return matrix[:middle] if self.half == "gate" else matrix[middle:]

    def __str__(self) -> str:
        if self.expert is None:
            return self.slot
        return f"{self.slot}, expert {self.expert}{f', {self.half} rows' if self.half else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """What the names of a checkpoint are matched with.

    Args:
        known: Every parameter and persistent buffer of the whole model, also those of other components.
        prefix: The base model's prefix, which some checkpoints leave out and others add.
        layers: The path of the list of decoder layers, prefix included.
        tied: Slots that may take another's tensor where their own is absent.
        ignored: Patterns of stored names that the model has no use for.
    """

    known: frozenset[str]
    prefix: str
    layers: str
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def place_of(self, stored_name: str) -> ParameterPlace | None:
        """Where a tensor of that name goes; None where the model has no place for it."""
        for name in self._spellings(stored_name):
            if name in self.known:
                return ParameterPlace(slot=name)
            match = _EXPERT.fullmatch(name)
            if match and match["matrix"] in _MATRICES:
                grouped, half = _MATRICES[match["matrix"]]
                slot = f"{match['experts']}.{grouped}"
                if slot in self.known:
                    return ParameterPlace(slot=slot, expert=int(match["number"]), half=half)
        return None

    def layer_of(self, stored_name: str) -> int | None:
        """The decoder layer that a stored tensor belongs to; None for none."""
        for name in self._spellings(stored_name):
            number, dot, _ = name.removeprefix(f"{self.layers}.").partition(".")
            if name.startswith(f"{self.layers}.") and dot and number.isdecimal():
                return int(number)
        return None

    def shift_layer(self, stored_name: str, shift: int) -> str:
        """The name of the same tensor in the layer that comes `shift` after; unchanged outside the layers."""
        layer = self.layer_of(stored_name)
        path = self.layers.removeprefix(f"{self.prefix}.")
        return (
            stored_name
            if layer is None
            else stored_name.replace(f"{path}.{layer}.", f"{path}.{layer + shift}.", 1)
        )

    def select(
        self, stored_names: Collection[str], slots: Mapping[str, Slot], *, layers: range
    ) -> frozenset[str]:
        """The stored names that `plan_binding` must see to fill `slots` and to find what is left over."""
        weights = {name: name.removesuffix(SCALE_ENDING) for name in stored_names}
        places = {name: self.place_of(weight) for name, weight in weights.items()}
        present = {place.slot for place in places.values() if place is not None}
        wanted = set(slots) | {self.tied[slot] for slot in slots if slot in self.tied and slot not in present}
        return frozenset(
            name
            for name, place in places.items()
            if (place is not None and place.slot in wanted)
            or (place is None and self.layer_of(name) in (None, *layers))
        )

    def is_ignored(self, stored_name: str) -> bool:
        """Whether the model declares that it has no use for that tensor."""
        return any(re.search(pattern, stored_name) for pattern in self.ignored)

    def _spellings(self, name: str) -> Iterator[str]:
        for text in dict.fromkeys((name, name.replace(".block_sparse_moe.", ".mlp."))):
            yield text
            yield f"{self.prefix}.{text}"
            yield text.removeprefix(f"{self.prefix}.")
