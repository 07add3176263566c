"""Held check: what a port holds of a layer, once it is loaded, compared with the checkpoint's numbers.

A line is a row or a column of a matrix, or a block of a vector (see `source_lines`). A kind of weight is the same for
all experts: `q_proj`, `w1`. E experts, n lines of each.

- A kind of which every line is held, wherever it lies, is compared: its numbers are right.
- If most of a kind is held, what is not is a *fault*: a part was not loaded, or not converted as the rest was.
- If less is held, the port has the kind in other numbers, as if it quantises. Then it is not compared. Zeros are a
  fault even so.
- An expert that lies otherwise than most is a fault too: each line of an expert lies some places behind the same line
  of the expert before, and that step is one for all lines and experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from minimax_tools.capture.manifest import HeldWeights, WeightFault, WeightMistake
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.stored_dtype import dtype_name
from neuron.weight_trace.port_tensors import find_port_tensors
from neuron.weight_trace.source_lines import (
    Direction,
    Flags,
    LineTable,
    NotedTensors,
    Numbers,
    PortFamily,
    PortLines,
)
from neuron.weight_trace.source_tensors import (
    MAX_EXPERTS_LISTED,
    ROUTER_NAMES,
    expert_of,
    kind_of,
    word_experts,
)
from reports.wording import word_order

_ABSENT = -1
_ROUTER_KINDS = frozenset(map(kind_of, ROUTER_NAMES))
# What no port means to hold.
UNUSABLE = _ZEROS, _NONFINITE = ("zeros", "NaN or Inf")
# Norms of the same numbers in two dtypes differ by less than this share.
_NORM_SLACK = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Weights that a port holds otherwise than most of their kind."""

    kind: str
    expert: int | None  # None for weights that no expert has
    mistake: WeightMistake
    place: str  # names of the port's tensors
    what: str  # a clause on what lies in its place, or how it lies
    is_held: bool = True  # whether all its numbers are held
    is_certain: bool = False  # whether no port can mean it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedPart:
    """Content of a rank's port once it is loaded, beside the tensors that it was given."""

    table: LineTable
    is_held: Flags  # for each line of the layer, whether the port holds it
    port_tensors: Mapping[str, torch.Tensor]
    given: LayerTensors

    def describe_lost(
        self,
        family: PortFamily,
        lines: Numbers,
        places: Numbers,
        *,
        kind: str,
        expert: int | None,
        num_lines: int,
    ) -> Deviation:
        """Say what lies at the places of some lines of a tensor that are not held; it has `num_lines`."""
        what, mistake = self._word_others(family.found[places], kind), WeightMistake.SWAPPED
        if not what:
            values = family.values_at(self.port_tensors, places)
            what, mistake = word_values(values, self._read(lines, family.direction))
        part = "" if len(lines) == num_lines else f", {len(lines)} of {num_lines} {family.direction.value}"
        return Deviation(
            kind=kind,
            expert=expert,
            mistake=mistake,
            place=family.pattern,
            what=f"{what} in their place{part}",
            is_held=False,
            is_certain=what.startswith(UNUSABLE),
        )

    def _word_others(self, found: Numbers, kind: str) -> str:
        """Return whose lines were found; empty if most are not the checkpoint's."""
        lines = found[found >= 0]
        if len(lines) <= len(found) / 2:
            return ""
        name = self.table.name_of(int(np.sort(lines)[len(lines) // 2]))
        expert = expert_of(name)
        weights = "those" if kind_of(name) == kind else self.table.word([kind_of(name)])
        return weights if expert is None else f"{weights} of expert {expert}"

    def _read(self, lines: Numbers, direction: Direction) -> torch.Tensor:
        """Read lines of one tensor of the checkpoint, float32 [n,length]."""
        name = self.table.name_of(int(lines[0]))
        matrix = self.given[name].reshape(self.table.matrices[name]).float()
        places = lines - self.table.lines(name, direction).start
        return (matrix if direction is Direction.ROWS else matrix.T)[places]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLines:
    """Places of the experts' lines in one family."""

    family: PortFamily
    kinds: tuple[str, ...]  # kinds that the family holds
    kind_of: Numbers  # [n], index in `kinds` of each line
    numbers: Numbers  # [E,n], numbers of the lines in the checkpoint
    places: Numbers  # [E,n], their places in the family; `_ABSENT` for lines that are not there
    reference: int  # an expert that most others lie like
    shifts: Numbers  # [E], places by which an expert lies behind the reference
    step: int  # places from each expert to the next; 0 if most do not follow each other

    @classmethod
    def of(
        cls, family: PortFamily, table: LineTable, *, strays: Collection[tuple[str, int | None]] = ()
    ) -> ExpertLines | None:
        """Find the lines of experts in a family, without the kinds of `strays`; None if it holds none."""
        place_of = family.places_of(table)
        by_kind = table.of_experts[family.direction]
        for kind, expert in strays:
            place_of[by_kind[kind][expert]] = _ABSENT
        numbers = {kind: lines for kind, lines in by_kind.items() if (place_of[lines] >= 0).any()}
        if not numbers:
            return None
        joined = np.concatenate(list(numbers.values()), axis=1)
        places = place_of[joined]
        reference, shifts = _choose_reference(places)
        return cls(
            family=family,
            kinds=tuple(numbers),
            kind_of=np.repeat(np.arange(len(numbers)), [lines.shape[1] for lines in numbers.values()]),
            numbers=joined,
            places=places,
            reference=reference,
            shifts=shifts,
            step=_find_step(shifts, (places >= 0).any(axis=1)),
        )

    @property
    def order(self) -> list[int]:
        """The experts that are there, in the order in which they lie."""
        present = np.flatnonzero((self.places >= 0).any(axis=1))
        order: list[int] = present[np.argsort(self.shifts[present], kind="stable")].tolist()
        return order

    def experts_of(self, kind: str) -> frozenset[int]:
        """Return the experts of which at least one line of a kind is there."""
        is_there = self.places[:, self.kind_of == self.kinds.index(kind)] >= 0
        return frozenset(np.flatnonzero(is_there.any(axis=1)).tolist())

    def find_unlike(self) -> Iterator[Deviation]:
        """Yield experts that lie in another layout than most."""
        both = (self.places >= 0) & (self.places[self.reference] >= 0)
        shifts = self.places - self.places[self.reference]
        is_torn = (both & (shifts != self.shifts[:, None])).any(axis=1)
        followed = self.step * (np.arange(len(shifts)) - self.reference)
        expected: Numbers = followed if self.step else self.shifts
        for expert in np.flatnonzero(is_torn).tolist():
            is_unlike = both[expert] & (shifts[expert] != expected[expert])
            for index in np.unique(self.kind_of[is_unlike]):
                yield Deviation(
                    kind=self.kinds[index],
                    expert=expert,
                    mistake=WeightMistake.ORDER,
                    place=self.family.pattern,
                    what="in another layout than those of other experts",
                )

    def find_lost(self, part: LoadedPart) -> Iterator[Deviation]:
        """Yield what lies in the place of lines that are not held."""
        if not self.step:
            return
        expected = self.places[self.reference]
        is_lost = (expected >= 0) & ~part.is_held[self.numbers]
        for expert in np.flatnonzero(is_lost.any(axis=1)).tolist():
            places = expected + self.step * (expert - self.reference)
            is_inside = (places >= 0) & (places < len(self.family.found))
            for index, kind in enumerate(self.kinds):
                is_of_kind = (self.kind_of == index) & (expected >= 0)
                lost = np.flatnonzero(is_of_kind & is_lost[expert] & is_inside)
                if len(lost):
                    yield part.describe_lost(
                        self.family,
                        self.numbers[expert, lost],
                        places[lost],
                        kind=kind,
                        expert=expert,
                        num_lines=int(is_of_kind.sum()),
                    )


def find_disorder(experts: Sequence[ExpertLines]) -> Iterator[Deviation]:
    """Yield experts that lie in another order than the router's rows; without these, than their numbers."""
    router = next((lines for lines in experts if _ROUTER_KINDS & set(lines.kinds)), None)
    numbers = (
        sorted(expert for lines in experts for expert in lines.order) if router is None else router.order
    )
    rank_of = {expert: rank for rank, expert in enumerate(dict.fromkeys(numbers))}
    against = "" if router is None else ", the router's rows are not"
    for lines in experts:
        order = [expert for expert in lines.order if expert in rank_of]
        right = sorted(order, key=rank_of.__getitem__)
        if order == right:
            continue
        in_order = right == sorted(right)
        what = word_order(order, noun="experts") if in_order else "experts lie in another order"
        for expert, expected in zip(order, right, strict=True):
            if expert == expected:
                continue
            for kind in lines.kinds:
                yield Deviation(
                    kind=kind,
                    expert=expert,
                    mistake=WeightMistake.ORDER,
                    place=lines.family.pattern,
                    what=f"{what}{against}",
                )


def find_experts(
    families: Sequence[PortFamily], table: LineTable
) -> tuple[list[ExpertLines], list[Deviation]]:
    """Return the lines of experts in each family that holds any, and the experts that lie in others than most do."""
    found = [lines for family in families if (lines := ExpertLines.of(family, table)) is not None]
    strays: list[Deviation] = []
    for kind in dict.fromkeys(kind for lines in found for kind in lines.kinds):
        present = [lines for lines in found if kind in lines.kinds]
        home = max(present, key=lambda lines: len(lines.experts_of(kind)))
        strays += [
            Deviation(
                kind=kind,
                expert=expert,
                mistake=WeightMistake.SWAPPED,
                place=lines.family.pattern,
                what=f"there, where most experts have them in {home.family.pattern}",
            )
            for lines in present
            for expert in sorted(lines.experts_of(kind) - home.experts_of(kind))
        ]
    if strays:
        # They would look like experts in another order.
        left_out = {(stray.kind, stray.expert) for stray in strays}
        found = [
            lines
            for family in families
            if (lines := ExpertLines.of(family, table, strays=left_out)) is not None
        ]
    return found, strays


def find_gaps(family: PortFamily, part: LoadedPart) -> Iterator[Deviation]:
    """Yield what lies in the place of some lines of a tensor that no expert has, beside lines of it that are held."""
    table = part.table
    places = family.places_of(table)
    for name in table.shared:
        lines = np.r_[table.lines(name, family.direction)]
        present, lost = np.flatnonzero(places[lines] >= 0), np.flatnonzero(~part.is_held[lines])
        if len(present) < 2 or not len(lost):
            continue
        # The lines of a tensor lie one after the other, or at equal distances: the one next to it tells a line's place.
        step = int(np.median(np.diff(places[lines][present])))
        nearest = present[(np.searchsorted(present, lost) - 1).clip(min=0)]
        expected = places[lines][nearest] + step * (lost - nearest)
        is_inside = (expected >= 0) & (expected < len(family.found))
        # Where another line of the checkpoint lies, this tensor has an end.
        lost, expected = lost[is_inside], expected[is_inside]
        lost, expected = lost[family.found[expected] < 0], expected[family.found[expected] < 0]
        if len(lost):
            yield part.describe_lost(
                family, lines[lost], expected, kind=kind_of(name), expert=None, num_lines=len(lines)
            )


def word_values(values: torch.Tensor, expected: torch.Tensor) -> tuple[str, WeightMistake]:
    """Return what values [n,length] are, beside the expected ones, in words and by kind of mistake."""
    if not torch.isfinite(values).all():
        return _NONFINITE, WeightMistake.VALUES
    if not values.any():
        return _ZEROS, WeightMistake.ZERO
    ratio = float(values.norm() / expected.norm())
    what = "other numbers" if abs(ratio - 1) < _NORM_SLACK else f"numbers of {ratio:.3g} times the norm"
    return what, WeightMistake.VALUES


def _choose_reference(places: Numbers) -> tuple[int, Numbers]:
    """Return an expert that most others lie like, and the shift [E] of each against it."""
    num_held = (places >= 0).sum(axis=1)
    fullest = np.flatnonzero(num_held == num_held.max())
    tried = dict.fromkeys((int(fullest[0]), int(fullest[len(fullest) // 2]), int(fullest[-1])))
    ways = [(expert, *_shift_against(places, expert)) for expert in tried]
    reference, shifts, _ = max(ways, key=lambda way: int(way[2].sum()))
    return reference, shifts


def _shift_against(places: Numbers, reference: int) -> tuple[Numbers, Flags]:
    """Return the most common shift [E] of each expert's lines against those of one, and whether all share it."""
    both = (places >= 0) & (places[reference] >= 0)
    differences = places - places[reference]
    shifts = np.take_along_axis(differences, both.argmax(axis=1)[:, None], axis=1)[:, 0]
    is_alike = ((differences == shifts[:, None]) | ~both).all(axis=1)
    for expert in np.flatnonzero(~is_alike):
        values, counts = np.unique(differences[expert][both[expert]], return_counts=True)
        shifts[expert] = values[counts.argmax()]
    return np.where(both.any(axis=1), shifts, 0), is_alike


def _find_step(shifts: Numbers, is_present: Flags) -> int:
    """Return the shift from each expert to the next, if most of those that are there have one; else 0."""
    neighbours = is_present[1:] & is_present[:-1]
    steps, counts = np.unique((shifts[1:] - shifts[:-1])[neighbours], return_counts=True)
    return int(steps[counts.argmax()]) if len(counts) and 2 * counts.max() >= neighbours.sum() else 0


# Share of a kind from which on it counts as held.
_MOST = 0.5
# Flags, packed eight to a byte.
Bits = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldPart:
    """A rank's part of a layer, as far as it holds the checkpoint's lines."""

    held: Bits  # for each line of the layer, whether this rank holds it
    deviations: tuple[Deviation, ...]
    rounded: tuple[tuple[str, str], ...]  # kinds that are held rounded to BF16, each with the float32 tensor
    zeros: Mapping[str, int]  # sizes of weights that hold nothing but zeros, by name
    codes: tuple[str, ...]  # dtypes of weights whose values are not compared, such as `int8`


def check_part(module: nn.Module, tensors: NotedTensors, *, sent: PortLines, pool: ReadingPool) -> HeldPart:
    """Compare what a rank's module holds, once it is loaded, with the `tensors` that it was given.

    `sent` has the lines of tensors that were sent to a device; those of tensors on the CPU are added.
    """
    lines, port_tensors = sent, find_port_tensors(module)
    lines.note_all(port_tensors, pool)
    table, is_held = tensors.lines.table, tensors.lines.is_empty
    families = tuple(lines.families(tensors.lines))
    for family in families:
        is_held[family.held] = True
    experts, strays = find_experts(families, table)
    zeros = lines.zeros
    # The port may have removed tensors from its mapping.
    given = tensors.of_layer(tensors.layer)
    part = LoadedPart(table=table, is_held=is_held, port_tensors=port_tensors, given=given)
    found = [deviation for of_family in experts for deviation in of_family.find_unlike()]
    found += [deviation for of_family in experts for deviation in of_family.find_lost(part)]
    found += [deviation for family in families for deviation in find_gaps(family, part)]
    names = [name for name in module.state_dict() if name in port_tensors]
    return HeldPart(
        held=np.packbits(is_held),
        deviations=(*found, *strays, *find_disorder(experts)),
        rounded=tuple(_find_rounded(families, port_tensors, table)),
        zeros={name: port_tensors[name].numel() for name in names if name in zeros},
        codes=tuple(sorted({dtype_name(port_tensors[name].dtype) for name in names if name not in lines})),
    )


def conclude(parts: Sequence[HeldPart], table: LineTable) -> HeldWeights:
    """Return what all ranks hold together."""
    shares = _shares_held(np.bitwise_or.reduce([part.held for part in parts]), table)
    compared = _whole_kinds(shares)
    others = [kind for kind, of_kind in shares.items() if sum(of_kind.values()) < _MOST * len(of_kind)]
    partial = {kind: of_kind for kind, of_kind in shares.items() if kind not in (*compared, *others)}
    deviations = dict.fromkeys(deviation for part in parts for deviation in part.deviations)
    held = [deviation for deviation in deviations if deviation.is_held]
    lost = [
        deviation
        for deviation in deviations
        if not deviation.is_held
        and (deviation.kind in partial or (deviation.is_certain and deviation.kind in others))
    ]
    return HeldWeights(
        # With one rank there is nothing to divide.
        is_divided=len(parts) > 1 and _is_divided(parts, compared, table),
        compared=tuple(compared),
        not_compared=tuple(others),
        reason=_word_reason({code for part in parts for code in part.codes}) if others else "",
        faults=(
            *_join([*lost, *_find_nowhere(partial, lost), *held], table),
            *_zero_faults(others, parts, table),
            *_rounded_faults(parts, table),
        ),
    )


def _is_divided(parts: Sequence[HeldPart], kinds: Sequence[str], table: LineTable) -> bool:
    """Decide whether no rank holds the whole of some kind that all hold together."""
    whole = {kind for part in parts for kind in _whole_kinds(_shares_held(part.held, table))}
    return not whole.issuperset(kinds)


def _shares_held(packed: Bits, table: LineTable) -> dict[str, dict[str, float]]:
    """Return the share of each tensor that is held, by kind."""
    is_held = np.unpackbits(packed, count=table.size).astype(np.bool_)
    shares: dict[str, dict[str, float]] = {}
    for name in table.matrices:
        shares.setdefault(kind_of(name), {})[name] = _share_held(name, is_held, table)
    return shares


def _whole_kinds(shares: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the kinds of which every tensor is held."""
    return [kind for kind, of_kind in shares.items() if min(of_kind.values()) == 1]


def _find_rounded(
    families: Sequence[PortFamily], port_tensors: Mapping[str, torch.Tensor], table: LineTable
) -> Iterator[tuple[str, str]]:
    """Yield the kinds that a float32 tensor holds rounded to BF16, and its name."""
    for family in families:
        lines = family.found[family.is_rounded & (family.found >= 0)]
        if len(lines) and port_tensors[family.names[0]].dtype == torch.float32:
            yield kind_of(table.name_of(int(lines[0]))), family.pattern


def _share_held(name: str, is_held: Flags, table: LineTable) -> float:
    """Return the share of a tensor's rows that are held, or of its columns if that is more."""
    lines = [is_held[table.lines(name, direction)] for direction in Direction]
    return max(float(of_direction.mean()) for of_direction in lines if len(of_direction))


def _find_nowhere(
    shares: Mapping[str, Mapping[str, float]], lost: Sequence[Deviation]
) -> Iterator[Deviation]:
    """Yield the tensors of which a part is not held, and in whose place nothing was found."""
    known = {(deviation.kind, deviation.expert) for deviation in lost}
    for kind, of_kind in shares.items():
        for name, share in of_kind.items():
            expert = expert_of(name)
            if share < 1 and (kind, expert) not in known:
                part = "" if share == 0 else f", {100 * (1 - share):.3g} % of it"
                what = f"nowhere among the port's tensors{part}"
                yield Deviation(
                    kind=kind,
                    expert=expert,
                    mistake=WeightMistake.MISSING,
                    place="",
                    what=what,
                    is_held=False,
                )


def _join(deviations: Iterable[Deviation], table: LineTable) -> Iterator[WeightFault]:
    """Yield a fault for each clause: with all experts of a kind, then with all kinds that have the same experts."""
    alike: dict[tuple[str, str], list[Deviation]] = {}
    for deviation in deviations:
        alike.setdefault((deviation.what, deviation.kind), []).append(deviation)
    joined: dict[tuple[str, tuple[int, ...]], list[list[Deviation]]] = {}
    for (what, _), of_kind in alike.items():
        experts = tuple(sorted({d.expert for d in of_kind if d.expert is not None}))
        joined.setdefault((what, experts), []).append(of_kind)
    for (what, experts), of_kinds in joined.items():
        first = of_kinds[0][0]
        kinds = tuple(sorted(of_kind[0].kind for of_kind in of_kinds))
        places = dict.fromkeys(deviation.place for of_kind in of_kinds for deviation in of_kind)
        of_experts = f" of {word_experts(experts)}" if experts else ""
        more = f", {len(experts)} in all" if len(experts) > MAX_EXPERTS_LISTED else ""
        where = f" ({', '.join(places)})" if any(places) else ""
        yield WeightFault(
            kinds=kinds,
            experts=experts,
            text=f"{table.word(kinds)}{of_experts}{more}: {what}{where}",
            mistake=first.mistake,
            is_certain=first.is_certain,
            is_exception=2 * len(experts) < table.num_experts,
        )


def _zero_faults(kinds: Iterable[str], parts: Sequence[HeldPart], table: LineTable) -> Iterator[WeightFault]:
    """Yield kinds in whose place zeros lie: weights of the size of all of the kind that hold nothing else."""
    sizes: dict[str, int] = {}
    for part in parts:
        for name, size in part.zeros.items():
            sizes[name] = sizes.get(name, 0) + size
    for kind in kinds:
        of_kind = [shape for name, shape in table.matrices.items() if kind_of(name) == kind]
        size = sum(num_rows * num_columns for num_rows, num_columns in of_kind)
        names = [name for name, of_name in sizes.items() if of_name == size]
        if names:
            text = f"{table.word([kind])}: nowhere, and zeros in {' and '.join(names)} of its size"
            yield WeightFault(
                mistake=WeightMistake.ZERO, kinds=(kind,), experts=(), text=text, is_certain=True
            )


def _rounded_faults(parts: Sequence[HeldPart], table: LineTable) -> Iterator[WeightFault]:
    for kind, place in dict.fromkeys(rounded for part in parts for rounded in part.rounded):
        text = f"{table.word([kind])}: rounded to BF16 ({place}, which is float32)"
        yield WeightFault(mistake=WeightMistake.DTYPE, kinds=(kind,), experts=(), text=text)


def _word_reason(codes: Iterable[str]) -> str:
    dtypes = ", ".join(sorted(codes))
    if dtypes:
        return f"the port holds weights in {dtypes}"
    return "the port holds them in other numbers, in parts of rows and columns, or where mm2 does not look"
