"""Port lines: the lines of a port's tensors, each found among the lines of the checkpoint's layer.

A *family* is a tensor, or all tensors whose names differ in numbers alone, as `experts.0.w1`, `experts.1.w1` do. Its
lines lie in the order of these numbers. A port may hold a matrix as it is or transposed, fused or in blocks, so a
family is divided into lines in the way in which most of them are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.line_sums import LineSums, Sums
from minimax_tools.model.spec import ModelSpec
from neuron.weight_trace.port_tensors import name_numbers, name_pattern
from neuron.weight_trace.source_lines import FOREIGN, Direction, Flags, LineTable, Numbers, SourceLines

# In float16 the small ones of BF16's numbers are rounded, others not: that is no way to tell a line.
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
# Lines of a family by which the way is chosen.
_NUM_TRIED = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PortFamily:
    """Tensors of a port, and where each of their lines comes from."""

    names: tuple[str, ...]  # the tensors, in the order of the numbers in their names
    way: str  # the way in which each is divided into lines
    direction: Direction  # direction that the lines have in the checkpoint
    found: Numbers  # number of the source line that each line holds; or `FOREIGN`, `EMPTY`, `AMBIGUOUS`
    is_rounded: Flags  # whether each is the line rounded to BF16
    held: Numbers  # numbers of all source lines that are held, of lines that are alike all

    @property
    def pattern(self) -> str:
        """The name of the tensors, with `#` for numbers that differ."""
        return self.names[0] if len(self.names) == 1 else name_pattern(self.names[0])

    def places_of(self, table: LineTable) -> Numbers:
        """Return the place of each line of the checkpoint's layer; -1 for those that are not there."""
        places = np.full(table.size, -1)
        # Backwards, so that of several copies the first counts.
        held = np.flatnonzero(self.found >= 0)[::-1]
        places[self.found[held]] = held
        return places

    def values_at(self, tensors: Mapping[str, torch.Tensor], places: Numbers) -> torch.Tensor:
        """Return the lines at some places of the family, float32 [n,length]; `tensors` holds the port's by name."""
        per_tensor = len(self.found) // len(self.names)
        lines = (
            _divide(tensors[self.names[place // per_tensor]].detach(), self.way)[place % per_tensor]
            for place in places.tolist()
        )
        return torch.stack([line.float().cpu() for line in lines])


class PortLines:
    """Sums of the lines of a port's tensors; `spec` tells the widths of the blocks of vectors."""

    def __init__(self, spec: ModelSpec) -> None:
        self._widths = sorted({1, spec.head_dim, spec.hidden_size})
        self._sums: dict[str, dict[str, Sums]] = {}  # by tensor and way

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Sum up a tensor's lines; one of codes or of another dtype than BF16 and float32 is left out."""
        if tensor.dtype in _DTYPES and tensor.dim() and tensor.numel() and tensor.device.type == "cpu":
            self._sums[name] = dict(self._sum_up(tensor))

    def note_all(self, tensors: Mapping[str, torch.Tensor], pool: ReadingPool) -> None:
        """Sum up the lines of all tensors, one in each thread."""
        pool.start(partial(self.note, name, tensor) for name, tensor in tensors.items()).finish()

    def __contains__(self, name: object) -> bool:
        """Decide whether a tensor's lines were summed up."""
        return name in self._sums

    @property
    def zeros(self) -> frozenset[str]:
        """Names of tensors that hold nothing but zeros."""
        return frozenset(
            name for name, sums in self._sums.items() if not any(of_way.any() for of_way in sums.values())
        )

    def families(self, source: SourceLines) -> Iterator[PortFamily]:
        """Yield the families of which at least one line is found in the checkpoint."""
        alike: dict[tuple[object, ...], list[str]] = {}
        for name, sums in self._sums.items():
            sizes = ((way, len(of_way)) for way, of_way in sums.items())
            alike.setdefault((name_pattern(name), *sizes), []).append(name)
        for names in alike.values():
            family = self._read(tuple(sorted(names, key=name_numbers)), source)
            if family is not None:
                yield family

    def _sum_up(self, tensor: torch.Tensor) -> Iterator[tuple[str, Sums]]:
        if max(tensor.shape) == tensor.numel():
            for width in self._widths:
                if tensor.numel() % width == 0:
                    yield str(width), LineSums.of(_divide(tensor, str(width))).rows
            return
        sums = LineSums.of(tensor)
        yield "rows", sums.rows.reshape(-1)
        yield "columns", sums.columns.reshape(-1)
        if tensor.dim() > 2:
            yield "slices", sums.rows.reshape(len(tensor), -1).sum(axis=1)

    def _read(self, names: tuple[str, ...], source: SourceLines) -> PortFamily | None:
        """Read a family in the way in which most of its lines are found; None if none is."""
        of_ways = {way: self._join(names, way) for way in self._sums[names[0]]}
        ways = [(way, direction) for way in of_ways for direction in Direction]
        shares = [_share_found(of_ways[way], direction, source) for way, direction in ways]
        if not any(shares):
            return None
        way, direction = ways[shares.index(max(shares))]
        sums = of_ways[way]
        found, held = source.exact[direction].find_all(sums)
        is_foreign = found == FOREIGN
        found[is_foreign], held_rounded = source.rounded[direction].find_all(sums[is_foreign])
        return PortFamily(
            names=names,
            way=way,
            direction=direction,
            found=found,
            is_rounded=is_foreign & (found != FOREIGN),
            held=np.concatenate((held, held_rounded)),
        )

    def _join(self, names: tuple[str, ...], way: str) -> Sums:
        return np.concatenate([self._sums[name][way] for name in names])


def _share_found(sums: Sums, direction: Direction, source: SourceLines) -> float:
    """Return the share of lines that are found, of some of those that hold more than zeros."""
    sums = sums[sums != 0]
    tried = sums[:: max(1, len(sums) // _NUM_TRIED)]
    is_found = [
        index.find(tried) != FOREIGN for index in (source.exact[direction], source.rounded[direction])
    ]
    return float(np.logical_or(*is_found).mean()) if len(tried) else 0.0


def _divide(tensor: torch.Tensor, way: str) -> torch.Tensor:
    """Return a tensor's lines [n,length]; a way that is a number is the width of blocks."""
    divide = _WAYS.get(way)
    return tensor.reshape(-1, int(way)) if divide is None else divide(tensor)


# Ways to divide a tensor of several dims. A slice is all that one index of the first dim holds.
_WAYS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "rows": lambda tensor: tensor.reshape(-1, tensor.shape[-1]),
        "columns": lambda tensor: tensor.transpose(-1, -2).reshape(-1, tensor.shape[-2]),
        "slices": lambda tensor: tensor.reshape(len(tensor), -1),
    }
)
