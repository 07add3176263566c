"""Sources: the tensors of a layer as a port's conversion gets them, every element of them numbered."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FLOAT32_NAMES, expected_layer_shapes

_EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_ROLES = {"w1": "w1 (gate)", "w2": "w2 (down)", "w3": "w3 (up)", "gate": "gate (router)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensors:
    """One tensor of a layer.

    Args:
        name: The hub's, relative to the layer.
        shape: Its shape, of one or two dims.
        start: The number of its first element.
    """

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """How many elements a row of it has; 1 for a vector."""
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def expert(self) -> int | None:
        """The expert it belongs to."""
        match = _EXPERT.fullmatch(self.name)
        return int(match[1]) if match else None

    @property
    def kind(self) -> str:
        """What experts share and other tensors have alone: `q_proj`, `w1`, `e_score_correction_bias`."""
        match = _EXPERT.fullmatch(self.name)
        return match[2] if match else self.name.removesuffix(".weight").rpartition(".")[2]

    @property
    def is_float32(self) -> bool:
        """Whether it must never be rounded to the run's dtype: the router decides by it."""
        return self.name in FLOAT32_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Tensors of a layer, all or some, one after the other in one numbering from 0."""

    all: tuple[SourceTensors, ...]
    starts: torch.Tensor = field(repr=False, compare=False)

    @classmethod
    def of(cls, spec: ModelSpec) -> Sources:
        """Those of a layer of `spec`."""
        found: list[SourceTensors] = []
        start = 0
        for name, shape in expected_layer_shapes(spec).items():
            found.append(SourceTensors(name=name, shape=shape, start=start))
            start += found[-1].size
        return cls(all=tuple(found), starts=torch.tensor([source.start for source in found]))

    @property
    def size(self) -> int:
        """How many elements there are."""
        return self.all[-1].start + self.all[-1].size

    def get(self, name: str) -> SourceTensors | None:
        """The source of a name; None where there is none."""
        return next((source for source in self.all if source.name == name), None)

    def only(self, names: Iterable[str]) -> Sources:
        """Some of them, numbered from 0 without gaps."""
        wanted = set(names)
        found: list[SourceTensors] = []
        for source in self.all:
            if source.name in wanted:
                start = found[-1].start + found[-1].size if found else 0
                found.append(replace(source, start=start))
        return Sources(all=tuple(found), starts=torch.tensor([source.start for source in found]))

    def find(self, numbers: torch.Tensor) -> torch.Tensor:
        """For numbers of elements the indices of their sources in `all`."""
        return torch.bucketize(numbers.contiguous(), self.starts, right=True) - 1


def role(kind: str) -> str:
    """A kind as people know it: `w1 (gate)`."""
    return _ROLES.get(kind, kind)


def kinds_of(sources: Sequence[SourceTensors]) -> tuple[str, ...]:
    """The kinds of sources, each once."""
    return tuple(dict.fromkeys(source.kind for source in sources))


def word_sources(sources: Sequence[SourceTensors]) -> str:
    """Sources in words, experts put together: `q_proj`, `w1 (gate) of experts 3, 4`."""
    kinds: dict[str, list[int]] = {}
    for source in sources:
        kinds.setdefault(source.kind, [])
        if source.expert is not None:
            kinds[source.kind].append(source.expert)
    by_experts: dict[tuple[int, ...], list[str]] = {}
    for kind, experts in kinds.items():
        by_experts.setdefault(tuple(experts), []).append(role(kind))
    parts = []
    for numbers, kinds_of in by_experts.items():
        of = f" of {word_experts(numbers)}" if numbers else ""
        parts.append(f"{', '.join(kinds_of)}{of}")
    return "; ".join(parts)


def word_experts(experts: Sequence[int]) -> str:
    """`expert 3`, `experts 3, 5`, `experts 0–31`."""
    if len(experts) == 1:
        return f"expert {experts[0]}"
    if list(experts) == list(range(experts[0], experts[0] + len(experts))):
        return f"experts {experts[0]}–{experts[-1]}"
    shown = ", ".join(str(expert) for expert in experts[:8])
    return f"experts {shown}{', …' if len(experts) > 8 else ''}"
