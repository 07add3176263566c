"""ModuleNames: which parameter of a module a checkpoint's tensor belongs to, by its name.

Names differ in three ways:

| difference | checkpoint | module |
|---|---|---|
| prefix | `h.0.…` | `transformer.h.0.…` |
| block | `block_sparse_moe` | `mlp` |
| experts | one matrix each | grouped: `gate_up_proj` [E,2·I,H], gate rows first, and `down_proj` [E,H,I] |

E experts, I intermediate, H hidden.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from minimax_tools.checkpoint.expected_tensors import TensorSize

SCALE_ENDING = "_scale_inv"  # `x.weight_scale_inv` are the FP8 scales of `x.weight`
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")
# Where each matrix of an expert lies: the grouped tensor, and the half of the expert's rows in it.
_GATE, _UP, _DOWN = ("gate_up_proj", "gate"), ("gate_up_proj", "up"), ("down_proj", None)
_MATRICES: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {"w1": _GATE, "gate_proj": _GATE, "w3": _UP, "up_proj": _UP, "w2": _DOWN, "down_proj": _DOWN}
)


class Slot(TensorSize):
    """A parameter or persistent buffer of a module, before it has data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlace:
    """Place of a stored tensor: a whole slot, or one expert's rows in a slot that groups all experts."""

    slot: str  # name of the slot
    expert: int | None = None  # index of the expert in a grouped slot; None for a whole slot
    # `gate` for the first half of the expert's rows, `up` for the second; None for all rows.
    half: str | None = None

    def shape_in(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of the tensor that belongs here."""
        if self.expert is None:
            return slot.shape
        rows = slot.shape[1] if self.half is None else slot.shape[1] // 2
        return (rows, *slot.shape[2:])

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """Return this place's part of the slot's tensor."""
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
    """Names of a model that stored names are matched with."""

    known: frozenset[str]  # parameters and persistent buffers of the whole model, other components included
    prefix: str  # prefix of the base model, which some checkpoints leave out and others add
    layers: str  # path of the list of decoder layers, prefix included
    # For a slot that may have no stored tensor, the tied slot whose tensor fills it instead.
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # patterns of stored names that the model does not use

    def place_of(self, stored_name: str) -> ParameterPlace | None:
        """Return the place of a stored tensor; None if the model lacks one."""
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
        """Return the decoder layer of a stored tensor; None outside the layers."""
        for name in self._spellings(stored_name):
            number, dot, _ = name.removeprefix(f"{self.layers}.").partition(".")
            if name.startswith(f"{self.layers}.") and dot and number.isdecimal():
                return int(number)
        return None

    def shift_layer(self, stored_name: str, shift: int) -> str:
        """Return the stored name with its layer number raised by `shift`; names outside the layers stay."""
        layer = self.layer_of(stored_name)
        if layer is None:
            return stored_name
        path = self.layers.removeprefix(f"{self.prefix}.")
        return stored_name.replace(f"{path}.{layer}.", f"{path}.{layer + shift}.", 1)

    def select(
        self, stored_names: Collection[str], slots: Mapping[str, Slot], *, layers: range
    ) -> frozenset[str]:
        """Select the stored names that fill `slots`, and those without a place, which `plan_binding` judges.

        Without a place in the model, a name counts if it belongs to `layers` or to no layer.
        """
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
        """Decide whether the model declares that it does not use that tensor."""
        return any(re.search(pattern, stored_name) for pattern in self.ignored)

    def _spellings(self, stored_name: str) -> Iterator[str]:
        """Yield the names that a stored tensor may have in the model."""
        for name in dict.fromkeys((stored_name, stored_name.replace(".block_sparse_moe.", ".mlp."))):
            yield name
            yield f"{self.prefix}.{name}"
            yield name.removeprefix(f"{self.prefix}.")
