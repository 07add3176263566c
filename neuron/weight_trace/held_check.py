"""Held check: what a port holds of a layer, once it is loaded, compared with the checkpoint's numbers.

A line is a row or a column of a matrix, or a block of a vector (see `source_lines`). A kind of weight is the same for
all experts: `q_proj`, `w1`.

- A kind of which every line is held, wherever it lies, is compared: its numbers are right.
- If most of a kind is held, what is not is a *fault*: a part was not loaded, or not converted as the rest was.
- If less is held, the port has the kind in other numbers, as if it quantises, or folds a scale into it. Then it is not
  compared. Zeros are a fault even so.
- An expert that lies otherwise than most experts is a fault too, although all its numbers are held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from minimax_tools.capture.digests import dtype_name
from minimax_tools.capture.manifest import HeldWeights, WeightFault, WeightMistake
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from neuron.weight_trace.expert_lines import (
    Deviation,
    ReadLines,
    find_disorder,
    find_experts,
    find_gaps,
)
from neuron.weight_trace.port_lines import PortFamily, PortLines
from neuron.weight_trace.port_tensors import find_port_tensors
from neuron.weight_trace.source_lines import Direction, Flags, LineTable, NotedTensors, Numbers
from neuron.weight_trace.source_tensors import (
    MAX_EXPERTS_LISTED,
    expert_of,
    kind_of,
    word_experts,
    word_kinds,
)

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
    """Compare what a rank's module holds with the checkpoint.

    Args:
        module: The module, loaded.
        tensors: The layer that it was given. Where the module holds something else, a tensor is read again.
        sent: Lines of the tensors that were sent to a device; those of tensors on the CPU are added.
        pool: Threads that sum up lines.
    """
    lines, port_tensors = sent, find_port_tensors(module)
    lines.note_all(port_tensors, pool)
    table, is_held = tensors.lines.table, tensors.lines.is_empty
    families = tuple(lines.families(tensors.lines))
    for family in families:
        is_held[family.held] = True
    experts, strays = find_experts(families, table)
    # The port may have removed tensors from its mapping.
    read, zeros = _line_reader(tensors.of_layer(tensors.layer), table), lines.zeros
    found = [deviation for of_family in experts for deviation in of_family.find_unlike()]
    for of_family in experts:
        found += of_family.find_lost(is_held, table, port_tensors=port_tensors, read=read)
    for family in families:
        found += find_gaps(family, is_held, table, port_tensors=port_tensors, read=read)
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
            *_join([*lost, *_find_nowhere(partial, lost), *held], num_experts=table.num_experts),
            *_zero_faults(others, parts, table),
            *_rounded_faults(parts),
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


def _line_reader(tensors: LayerTensors, table: LineTable) -> ReadLines:
    def read(numbers: Numbers, direction: Direction) -> torch.Tensor:
        name = table.name_of(int(numbers[0]))
        matrix = tensors[name].reshape(table.matrices[name]).float()
        places = numbers - table.lines(name, direction).start
        return (matrix if direction is Direction.ROWS else matrix.T)[places]

    return read


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


def _join(deviations: Iterable[Deviation], *, num_experts: int) -> Iterator[WeightFault]:
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
            text=f"{word_kinds(kinds)}{of_experts}{more}: {what}{where}",
            mistake=first.mistake,
            is_certain=first.is_certain,
            is_exception=2 * len(experts) < num_experts,
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
            text = f"{word_kinds([kind])}: nowhere, and zeros in {' and '.join(names)} of its size"
            yield WeightFault(
                mistake=WeightMistake.ZERO, kinds=(kind,), experts=(), text=text, is_certain=True
            )


def _rounded_faults(parts: Sequence[HeldPart]) -> Iterator[WeightFault]:
    for kind, place in dict.fromkeys(rounded for part in parts for rounded in part.rounded):
        text = f"{word_kinds([kind])}: rounded to BF16 ({place}, which is float32)"
        yield WeightFault(mistake=WeightMistake.DTYPE, kinds=(kind,), experts=(), text=text)


def _word_reason(codes: Iterable[str]) -> str:
    dtypes = ", ".join(sorted(codes))
    if dtypes:
        return f"the port holds weights in {dtypes}"
    return "the port holds them in other numbers, in parts of rows and columns, or where mm2 does not look"
