"""PlacePart: of a place the part that what is followed lands in, told from how it answers.

A place may be too large to keep what is found of its elements, or even a copy. Where all its elements are equal, which
they are after a pass of ones, one number stands for the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Elements that are looked at at once, in float64.
AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Baseline:
    """What a place held after one pass.

    Args:
        shape: Its shape.
        values: A copy of it, or where all its elements are equal one of them, of no dims.
    """

    shape: torch.Size
    values: torch.Tensor

    @classmethod
    def of(cls, place: torch.Tensor) -> Baseline:
        """What a place holds now."""
        flat = place.reshape(-1)
        first = flat[:1].double()
        is_uniform = all(bool((part.double() == first).all()) for part in flat.split(AT_ONCE))
        return cls(shape=place.shape, values=flat[0].clone() if is_uniform else place.clone())

    def changes(self, place: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Slabs of the place along its first dim, and of each which elements differ from what was there, bool."""
        rows = max(1, AT_ONCE * len(place) // max(1, place.numel()))
        for start in range(0, len(place), rows):
            slab = slice(start, start + rows)
            before = self.values if self.values.dim() == 0 else self.values[slab]
            yield slab, place[slab].double() != before.double()

    def has_changed(self, place: torch.Tensor) -> bool:
        """Whether any element does."""
        return any(bool(changed.any()) for _, changed in self.changes(place))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacePart:
    """A part of a place: along each dim some indices.

    Args:
        indices: Of each dim, int64; None for all.
    """

    indices: tuple[torch.Tensor | None, ...]

    @classmethod
    def whole(cls, place: torch.Tensor) -> PlacePart:
        """All of it."""
        return cls(indices=(None,) * place.dim())

    @classmethod
    def first_element(cls, place: torch.Tensor) -> PlacePart:
        """One element, which stands for all where they are equal."""
        return cls(indices=(torch.zeros(1, dtype=torch.int64),) * place.dim())

    @classmethod
    def changed(cls, baseline: Baseline, place: torch.Tensor) -> PlacePart | None:
        """The least part that holds every element that changed; None where none did."""
        first = torch.zeros(len(place), dtype=torch.bool)
        others = torch.zeros(place.shape[1:], dtype=torch.bool)
        for slab, changed in baseline.changes(place):
            first[slab] = changed.flatten(1).any(dim=1) if changed.dim() > 1 else changed
            others |= changed.any(dim=0)
        if not bool(first.any()):
            return None
        answering = [first]
        for dim in range(others.dim()):
            answering.append(others.movedim(dim, 0).flatten(1).any(dim=1) if others.dim() > 1 else others)
        return cls(
            indices=tuple(
                None if bool(answers.all()) else answers.nonzero().flatten() for answers in answering
            )
        )

    def of(self, place: torch.Tensor) -> torch.Tensor:
        """That part of a place; the place itself where it is all of it."""
        for dim, index in enumerate(self.indices):
            if index is not None:
                place = _select(place, dim, index)
        return place

    def of_baseline(self, baseline: Baseline) -> torch.Tensor:
        """What that part held."""
        if baseline.values.dim() == len(baseline.shape):
            return self.of(baseline.values)
        sizes = [
            size if index is None else len(index)
            for size, index in zip(baseline.shape, self.indices, strict=True)
        ]
        return baseline.values.expand(sizes)


def _select(place: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Some indices of a dim, of any dtype: torch picks none of FP8's."""
    if place.is_floating_point() and place.itemsize == 1:
        return place.view(torch.uint8).index_select(dim, index).view(place.dtype)
    return place.index_select(dim, index)
