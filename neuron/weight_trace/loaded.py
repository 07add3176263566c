"""Loaded: the port as it is with the checkpoint's own layer in it, held against what was read.

A conversion that only moves elements keeps them all: whatever the order, the numbers of the places that hold some
kinds of tensors add up, exactly, to those of the tensors. So no layout of the true size has to be traced.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from neuron.weight_trace.finding import Severity, WeightFinding, WeightMistake
from neuron.weight_trace.layout import PlaceLayout
from neuron.weight_trace.sources import role

_NUMBER = re.compile(r"\d+")
# Integers of a row are added up exactly in int64; more rows at once take more memory.
_ELEMENTS_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheck:
    """What was found in a loaded port.

    Args:
        findings: What is wrong.
        compared: The kinds of tensors whose numbers were held against the checkpoint's, all of them.
    """

    findings: tuple[WeightFinding, ...]
    compared: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """What a bag of numbers adds up to, whatever their order: of their bits, and of their squares."""

    count: int = 0
    bits: int = 0
    mixed_bits: int = 0
    squares: float = 0.0
    num_nan: int = 0

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            count=self.count + other.count,
            bits=self.bits + other.bits,
            mixed_bits=self.mixed_bits + other.mixed_bits,
            squares=self.squares + other.squares,
            num_nan=self.num_nan + other.num_nan,
        )

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Sums:
        total = cls()
        for part in tensor.detach().reshape(-1).split(_ELEMENTS_AT_ONCE):
            values = part.contiguous()
            # Both zeros are one number.
            bits = (
                torch.where(values == 0, torch.zeros_like(values), values)
                .view(_BITS[values.element_size()])
                .long()
            )
            total += cls(
                count=values.numel(),
                bits=int(bits.sum()),
                mixed_bits=int((bits * bits % 65_521).sum()),
                squares=float(values.double().nan_to_num().square().sum()),
                num_nan=int((~torch.isfinite(values)).sum()),
            )
        return total

    def holds_the_same(self, other: _Sums) -> bool:
        return (self.count, self.bits, self.mixed_bits) == (other.count, other.bits, other.mixed_bits)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def find_in_loaded(
    places: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
    tensors: LayerTensors,
    layouts: Sequence[PlaceLayout],
    *,
    known: Collection[str],
) -> LoadedCheck:
    """What is wrong with a port that was loaded with a layer of the checkpoint, and not seen in the trace.

    Args:
        places: What it holds.
        before: Small places, as its constructor left them.
        tensors: The layer as it was given.
        layouts: What the trace found, of this model or a smaller one; places are matched by their names.
        known: The kinds that are known to be wrong: nothing more is said of them.
    """
    found: list[WeightFinding] = []
    compared: list[str] = []
    groups = _groups(layouts, known)
    names: dict[str, list[str]] = {}
    for name in places:
        names.setdefault(_key(name), []).append(name)
    for keys, kinds in groups:
        own = [name for key in keys for name in names.get(key, ())]
        if not own:
            continue
        held = [places[name] for name in own]
        wrong, is_compared = _find_in_group(own, held, kinds, tensors, before)
        found += wrong
        compared += kinds if is_compared else ()
    return LoadedCheck(findings=tuple(found), compared=tuple(compared))


def _find_in_group(
    names: Sequence[str],
    held: Sequence[torch.Tensor],
    kinds: tuple[str, ...],
    tensors: LayerTensors,
    before: Mapping[str, torch.Tensor],
) -> tuple[list[WeightFinding], bool]:
    """What is wrong with places that hold some kinds, and whether all their numbers were compared."""
    words = ", ".join(map(role, kinds))

    def wrong(mistake: WeightMistake, places: Sequence[str], text: str) -> WeightFinding:
        return WeightFinding(
            mistake=mistake,
            weight=Severity.WRONG,
            tensors=kinds,
            places=tuple(places),
            text=f"as loaded, {text}",
        )

    sums = [_Sums.of(tensor) for tensor in held]
    broken = [name for name, of in zip(names, sums, strict=True) if of.num_nan]
    if broken:
        return [wrong(WeightMistake.VALUES, broken, f"{_listed(broken)} holds NaN or Inf")], True
    empty = [name for name, of in zip(names, sums, strict=True) if of.squares == 0]
    if empty:
        kept = [
            name for name in empty if name in before and torch.equal(before[name], held[names.index(name)])
        ]
        if kept:
            text = f"{_listed(kept)} holds the zeros of its constructor: {words} never got there"
            return [wrong(WeightMistake.NEVER_BOUND, kept, text)], True
        return [
            wrong(WeightMistake.ZERO, empty, f"{_listed(empty)} is zero everywhere, where {words} should be")
        ], True
    dtype = held[0].dtype
    if any(tensor.dtype != dtype for tensor in held):
        return [], False
    given = _Sums()
    for name in tensors:
        if _kind_of(name) in kinds:
            given += _Sums.of(tensors[name].to(dtype))
    total = sum(sums, _Sums())
    if total.holds_the_same(given):
        return [], True
    # Padding and copies change how many numbers there are; then nothing more can be told.
    if total.count != given.count:
        return [], False
    ratio = (total.squares / given.squares) ** 0.5 if given.squares else float("inf")
    if abs(ratio - 1) > 1e-3:
        text = (
            f"{_listed(names)} holds {words} scaled: its norm is {ratio:.4g} times that of the checkpoint's"
        )
        return [wrong(WeightMistake.SCALED, names, text)], True
    text = f"{_listed(names)} holds other numbers than the checkpoint's {words}, of the same norm"
    return [wrong(WeightMistake.VALUES, names, text)], True


def _groups(
    layouts: Sequence[PlaceLayout], known: Collection[str]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Names of places, their numbers left out, and the kinds that they hold between them, all of each.

    Only those that hold nothing but single elements as they are given: what is scaled, computed or padded on purpose
    is not what was read.
    """
    of_kind: dict[str, set[str]] = {}
    kinds_of: dict[str, set[str]] = {}
    spoiled = set(known)
    for layout in layouts:
        key, origin = _key(layout.origin.name), layout.origin
        kinds = {piece.source.kind for piece in layout.pieces if piece.source is not None}
        if not kinds:
            continue
        kinds_of.setdefault(key, set()).update(kinds)
        for kind in kinds:
            of_kind.setdefault(kind, set()).add(key)
        if (
            origin.num_computed
            or origin.num_constant
            or origin.gain != 1
            or origin.offset != 0
            or origin.rounding
        ):
            spoiled |= kinds
    groups, seen = [], set[str]()
    for key in kinds_of:
        if key in seen:
            continue
        keys, kinds, waiting = {key}, set[str](), [key]
        while waiting:
            for kind in kinds_of[waiting.pop()]:
                kinds.add(kind)
                new = of_kind[kind] - keys
                keys |= new
                waiting.extend(new)
        seen |= keys
        if not kinds & spoiled:
            groups.append((tuple(sorted(keys)), tuple(sorted(kinds))))
    return groups


def _kind_of(name: str) -> str:
    last = name.removesuffix(".weight").rpartition(".")[2]
    return last


def _key(name: str) -> str:
    return _NUMBER.sub("#", name)


def _listed(names: Sequence[str]) -> str:
    keys = list(dict.fromkeys(_key(name) if len(names) > 3 else name for name in names))
    return ", ".join(keys)
