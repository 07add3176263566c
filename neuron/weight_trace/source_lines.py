"""Source lines: the rows and columns of a layer's tensors, as the checkpoint gives them, and as a port holds them.

A line is a row or a column of a matrix, or a block of a vector: a head of a q/k norm or of a bias, one number of the
correction bias, a whole layer norm. Each has a number, by which all ranks know it. R rows and C columns of a matrix,
E experts.

A *family* is a tensor, or all tensors whose names differ in numbers alone. A port may hold a matrix as it is or
transposed, fused or in blocks, so a family is divided into lines in the way in which most of them are found.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from types import MappingProxyType

import numpy as np
import torch

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.machine.compiled import compiled
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    K_BIAS,
    K_NORM,
    Q_BIAS,
    Q_NORM,
    V_BIAS,
    expected_layer_shapes,
)
from neuron.weight_trace.port_tensors import name_numbers, name_pattern
from neuron.weight_trace.source_tensors import ROUTER_NAMES, expert_of, kind_of, word_kinds

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

Sums = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
_Codes = np.ndarray[tuple[int, int], np.dtype[np.unsignedinteger]]

# A BF16 value is the upper half of the same value in float32.
_BF16_SHIFT = 16

# In place of a line's number:
FOREIGN = -1  # no line of the checkpoint
EMPTY = -2  # zeros
AMBIGUOUS = -3  # one of several lines of the checkpoint that are alike


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LineSums:
    """Sums of the rows and columns of a matrix [R,C], or of each of several matrices [...,R,C].

    A line's sum adds up a hash of each of its values, modulo 2⁶⁴. It is the same in whatever order the values lie, and
    in every dtype that holds them exactly. Zeros do not count, so padding changes no sum. The sums of the parts of a
    line add up to that of the whole.
    """

    rows: Sums  # uint64 [...,R]
    columns: Sums  # uint64 [...,C]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LineSums:
        """Sum up the lines of a floating-point tensor of at least two dims, on the CPU."""
        *lead, num_rows, num_columns = tensor.shape
        rows = np.zeros((*lead, num_rows), dtype=np.uint64)
        columns = np.zeros((*lead, num_columns), dtype=np.uint64)
        matrices = tensor.detach().reshape(-1, num_rows, num_columns)
        for matrix, of_rows, of_columns in zip(
            matrices, rows.reshape(-1, num_rows), columns.reshape(-1, num_columns), strict=True
        ):
            if matrix.is_contiguous() or not matrix.T.is_contiguous():
                _add(matrix, of_rows, of_columns)
            else:
                _add(matrix.T, of_columns, of_rows)
        return cls(rows=rows, columns=columns)


def _add(matrix: torch.Tensor, rows: Sums, columns: Sums) -> None:
    if matrix.dtype == torch.bfloat16:
        codes, shift = matrix.contiguous().view(torch.uint16), _BF16_SHIFT
    else:
        codes, shift = matrix.float().contiguous().view(torch.uint32), 0
    _add_hashes(codes.numpy(), np.uint32(shift), rows, columns)


@compiled(
    "(uint16[:, ::1], uint32, uint64[::1], uint64[::1])",
    "(uint32[:, ::1], uint32, uint64[::1], uint64[::1])",
    sums_in_any_order=True,
)
def _add_hashes(codes: _Codes, shift: np.uint32, rows: Sums, columns: Sums) -> None:
    """Add the hash of each element to the sums of its row and its column; `codes << shift` are float32's bits.

    The hash gives every value another number of 32 bits, as its steps can all be undone: no other single value has the
    same sum. The casts of every step keep 32 bits, for vector instructions.
    """
    for row in range(codes.shape[0]):
        line = codes[row]
        total = np.uint64(0)
        for column in range(line.size):
            bits = np.uint32(np.uint32(line[column]) << shift)
            # -0 counts as 0, whose hash is 0.
            bits = np.uint32(0) if bits == np.uint32(1 << 31) else bits
            mixed = np.uint32(bits * np.uint32(0x9E3779B1))
            mixed = np.uint32(mixed ^ (mixed >> np.uint32(15)))
            mixed = np.uint32(mixed * np.uint32(0x85EBCA6B))
            mixed = np.uint32(mixed ^ (mixed >> np.uint32(13)))
            hashed = np.uint64(mixed)
            total += hashed
            columns[column] += hashed
        rows[row] += total


class Direction(Enum):
    """Direction of lines in the checkpoint."""

    ROWS = "rows"  # and blocks of vectors
    COLUMNS = "columns"


class LineTable:
    """Numbers of the lines of a layer of `spec`: of each tensor the rows, then the columns."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        self.matrices: dict[
            str, tuple[int, int]
        ] = {}  # each tensor as a matrix [R,C]; a vector has a row per block
        self._starts: dict[tuple[str, Direction], int] = {}
        self._stops: dict[tuple[str, Direction], int] = {}
        self.size = 0  # number of lines
        self.num_experts = spec.num_local_experts
        self._names = spec.family.stored_names
        by_heads = (Q_NORM, K_NORM, Q_BIAS, K_BIAS, V_BIAS)
        widths = {CORRECTION_BIAS: 1, **dict.fromkeys(by_heads, spec.head_dim)}
        for name, shape in expected_layer_shapes(spec, layer).items():
            if len(shape) == 1:
                width = widths.get(name, shape[0])
                self.matrices[name] = shape[0] // width, width
                counts = (shape[0] // width, 0)
            else:
                self.matrices[name] = counts = shape[0], shape[1]
            for direction, count in zip(Direction, counts, strict=True):
                self._starts[name, direction] = self.size
                self.size += count
                self._stops[name, direction] = self.size

    def lines(self, name: str, direction: Direction) -> slice:
        """Return the numbers of a tensor's lines; a vector has none along its columns."""
        return slice(self._starts[name, direction], self._stops[name, direction])

    def name_of(self, number: int) -> str:
        """Return the tensor of a line."""
        place = bisect_right(tuple(self._starts.values()), number) - 1
        return tuple(self._starts)[place][0]

    def word(self, kinds: Iterable[str]) -> str:
        """Return kinds as text; see `word_kinds`."""
        return word_kinds(kinds, self._names)

    @property
    def shared(self) -> Iterator[str]:
        """Tensors that no expert has."""
        return (name for name in self.matrices if expert_of(name) is None)

    @cached_property
    def by_direction(self) -> Mapping[Direction, Numbers]:
        """Numbers of all lines of each direction."""
        return {
            direction: np.concatenate([np.r_[self.lines(name, direction)] for name in self.matrices]).astype(
                int
            )
            for direction in Direction
        }

    @cached_property
    def of_experts(self) -> Mapping[Direction, Mapping[str, Numbers]]:
        """Numbers [E,n] of the experts' lines, by direction and kind of weight.

        Rows of the router's gate, and numbers of its correction bias, are lines of their experts.
        """
        return {direction: dict(self._of_experts(direction)) for direction in Direction}

    def _of_experts(self, direction: Direction) -> Iterator[tuple[str, Numbers]]:
        by_kind: dict[str, list[Numbers]] = {}
        for name in self.matrices:
            if expert_of(name) is not None:
                by_kind.setdefault(kind_of(name), []).append(np.r_[self.lines(name, direction)])
            elif name in ROUTER_NAMES and direction is Direction.ROWS:
                yield kind_of(name), np.r_[self.lines(name, direction)][:, None]
        for kind, lines in by_kind.items():
            yield kind, np.stack(lines)


class SourceLines:
    """Sums of a layer's lines, as far as the checkpoint gave them. Threads may note tensors at once."""

    def __init__(self, table: LineTable) -> None:
        self.table = table
        self._num_read = np.zeros(table.size, dtype=np.int32)  # numbers of each line that were read
        self._is_known = np.zeros(table.size, dtype=np.bool_)
        self._sums = np.zeros(table.size, dtype=np.uint64)
        # Of float32 values the sums once they are rounded to BF16, as a port may hold them.
        self._rounded = np.zeros(table.size, dtype=np.uint64)
        self._lock = threading.Lock()

    def note(
        self, name: str, values: torch.Tensor, *, rows: range | None = None, columns: range | None = None
    ) -> None:
        """Note the lines of a tensor, or of some rows and columns; a line is known once all of it was read."""
        num_rows, num_columns = self.table.matrices[name]
        if values.device.type != "cpu":
            return
        if values.dim() == 1:
            if len(values) % num_columns:
                return
            values = values.reshape(-1, num_columns)
            rows = None if rows is None else range(rows.start // num_columns, rows.stop // num_columns)
        exact = LineSums.of(values)
        rounded = LineSums.of(values.bfloat16()) if values.dtype == torch.float32 else None
        is_whole = rows is None and columns is None
        spans = (
            (Direction.ROWS, rows or range(num_rows), num_columns, values.shape[1]),
            (Direction.COLUMNS, columns or range(num_columns), num_rows, values.shape[0]),
        )
        with self._lock:
            for direction, cut, length, num_read in spans:
                lines = self.table.lines(name, direction)
                if lines.start == lines.stop:
                    continue  # a vector has no columns
                lines = slice(lines.start + cut.start, lines.start + cut.stop)
                if is_whole:
                    self._sums[lines] = self._rounded[lines] = self._num_read[lines] = 0
                self._sums[lines] += getattr(exact, direction.value)
                if rounded is not None:
                    self._rounded[lines] += getattr(rounded, direction.value)
                self._num_read[lines] += num_read
                # What was read more often in parts is not known.
                self._is_known[lines] = self._num_read[lines] == length

    @property
    def is_empty(self) -> Flags:
        """Flags of lines that were given, and hold nothing but zeros."""
        is_empty: Flags = self._is_known & (self._sums == 0)
        return is_empty

    @cached_property
    def exact(self) -> Mapping[Direction, LineIndex]:
        """Lines by the sums of their values."""
        known = np.where(self._is_known, self._sums, 0)
        return {
            direction: LineIndex(known, numbers) for direction, numbers in self.table.by_direction.items()
        }

    @cached_property
    def rounded(self) -> Mapping[Direction, LineIndex]:
        """Lines by the sums of their values rounded to BF16, where these are others."""
        is_other = self._is_known & (self._rounded != self._sums)
        rounded = np.where(is_other, self._rounded, 0)
        return {
            direction: LineIndex(rounded, numbers) for direction, numbers in self.table.by_direction.items()
        }


class LineIndex:
    """Lines of one direction, found by their sums (uint64, by the line's number); lines whose sum is 0 are left out."""

    def __init__(self, sums: Sums, numbers: Numbers) -> None:
        numbers = numbers[sums[numbers] != 0]
        order = np.argsort(sums[numbers])
        self._numbers, self._sums = numbers[order], sums[numbers[order]]
        # Lines that are alike have one sum: such as rows of zeros and a single one.
        is_first = np.r_[True, self._sums[1:] != self._sums[:-1]][: len(order)]
        self._group_of = np.cumsum(is_first) - 1
        self._group_size = np.bincount(self._group_of)

    def find(self, sums: Sums) -> Numbers:
        """Return the number of the line of each sum; or `FOREIGN`, `EMPTY`, `AMBIGUOUS`."""
        return self._find(sums)[0]

    def find_all(self, sums: Sums) -> tuple[Numbers, Numbers]:
        """Return what `find` does, and the numbers of all lines that have one of these sums."""
        found, groups = self._find(sums)
        is_held = np.zeros(len(self._group_size), dtype=np.bool_)
        is_held[groups] = True
        return found, self._numbers[is_held[self._group_of]]

    def _find(self, sums: Sums) -> tuple[Numbers, Numbers]:
        """Return what `find` does, and the groups of alike lines that have one of these sums."""
        found = np.where(sums == 0, EMPTY, FOREIGN)
        if not len(self._sums):
            return found, np.zeros(0, dtype=int)
        order = np.argsort(sums)  # a search in ascending order stays in the cache
        places = np.empty(len(sums), dtype=int)
        places[order] = np.searchsorted(self._sums, sums[order]).clip(max=len(self._sums) - 1)
        is_found = self._sums[places] == sums
        groups = self._group_of[places[is_found]]
        is_single = self._group_size[groups] == 1
        found[is_found] = np.where(is_single, self._numbers[places[is_found]], AMBIGUOUS)
        return found, groups


class NotedTensors(LayerTensors):
    """A layer's tensors, of which each is noted as the checkpoint gives it; copies note in the same place."""

    lines: SourceLines

    @classmethod
    def noting(
        cls, reader: CheckpointReader, spec: ModelSpec, layer: int, dtype: torch.dtype, *, table: LineTable
    ) -> NotedTensors:
        """Open the tensors of a layer, as `LayerTensors.open` does; `table` is of the same `spec`."""
        tensors = cls.open(reader, spec, layer, dtype)
        assert isinstance(tensors, NotedTensors), "open makes an object of this class"
        tensors.lines = SourceLines(table)
        return tensors

    def read_into(
        self, name: str, out: torch.Tensor, *, rows: range | None = None, columns: range | None = None
    ) -> None:
        """Fill `out` as `LayerTensors.read_into` does."""
        super().read_into(name, out, rows=rows, columns=columns)
        if self.is_stored(name):
            self.lines.note(name, out, rows=rows, columns=columns)

    def __getitem__(self, name: str) -> torch.Tensor:
        value = super().__getitem__(name)
        if self.is_stored(name):
            self.lines.note(name, value)
        return value


# In float16 the small ones of BF16's numbers are rounded, others not: that is no way to tell a line.
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
# Lines of a family by which the way is chosen.
_NUM_TRIED = 256
# The way of single numbers, and the least share of them that must be found: a few numbers of any vector are those of
# some expert's bias by chance, above all once both are in BF16.
_SINGLE_NUMBERS, _LEAST_SINGLE = "1", 0.5


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
        sparsity = spec.graph.sparsity
        of_indexer = () if sparsity is None else (sparsity.head_dim,)
        self._widths = sorted({1, spec.head_dim, spec.hidden_size, *of_indexer})
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
        shares = [
            0.0 if way == _SINGLE_NUMBERS and share < _LEAST_SINGLE else share
            for share, (way, _) in zip(shares, ways, strict=True)
        ]
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
