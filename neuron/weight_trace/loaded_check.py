"""Loaded check: a port that holds the checkpoint's own layer, compared with what was read.

A conversion that only moves elements keeps their checksum, whatever their order. So the port's tensors that together
hold some kinds of source tensors are compared with these by checksums, and no layout of the true size is traced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from operator import add

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from neuron.weight_trace.port_tensors import name_pattern
from neuron.weight_trace.source_tensors import kind_of, word_kinds
from neuron.weight_trace.tensor_layout import TensorLayout
from neuron.weight_trace.tensor_origin import TensorOrigin
from neuron.weight_trace.weight_finding import Severity, WeightFinding, WeightMistake

# Elements added up at once: 128 MiB in int64, and no sum of their bits overflows.
_ELEMENTS_AT_ONCE = 1 << 24
# The largest prime below 2¹⁶: bits are squared modulo it, so that a sum of squares cannot overflow.
_PRIME = 65_521
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Norms of the same values in another order agree to 1e-12; a ratio this far from 1 is a scale.
_RATIO_SLACK = 1e-3
_MAX_NAMES_LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedPort:
    """A port that holds the checkpoint's layer.

    Args:
        port_tensors: Every tensor that it holds, by name.
        before: Copies of the small ones, as the constructor left them.
        source: The layer in the checkpoint.
    """

    port_tensors: Mapping[str, torch.Tensor]
    before: Mapping[str, torch.Tensor]
    source: LayerTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheck:
    """Result of the check.

    Args:
        compared: Kinds of source tensors whose values were all compared.
    """

    findings: tuple[WeightFinding, ...]
    compared: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Checksum:
    """Sums over values in any order: of their bits, of the squares of these, and of the values' squares.

    Two are equal where the values have the same bits.
    """

    count: int = 0
    bits: int = 0
    squared_bits: int = 0
    squares: float = field(default=0.0, compare=False)
    num_nonfinite: int = field(default=0, compare=False)

    def __add__(self, other: _Checksum) -> _Checksum:
        return _Checksum(*map(add, astuple(self), astuple(other)))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Checksum:
        total = cls()
        for chunk in tensor.detach().reshape(-1).split(_ELEMENTS_AT_ONCE):
            values = chunk.contiguous()
            # -0 counts as 0.
            unsigned = torch.where(values == 0, torch.zeros_like(values), values)
            bits = unsigned.view(_INTEGERS[values.element_size()]).long()
            total += cls(
                count=values.numel(),
                bits=int(bits.sum()),
                squared_bits=int((bits * bits % _PRIME).sum()),
                squares=float(values.double().nan_to_num().square().sum()),
                num_nonfinite=int((~torch.isfinite(values)).sum()),
            )
        return total


class _NotComparableError(Exception):
    """Values of a group that differ in number or dtype from the checkpoint's: padded, copied or mixed."""


def check_loaded(
    loaded: LoadedPort, layouts: Sequence[TensorLayout], *, known_kinds: Collection[str]
) -> LoadedCheck:
    """Return the faults of a loaded port that the trace did not show.

    Args:
        loaded: The port.
        layouts: Layouts from the trace, of this model or a smaller one; tensors are matched by their names.
        known_kinds: Kinds that are known to be wrong: they are not checked.
    """
    findings: list[WeightFinding] = []
    compared: list[str] = []
    for kinds, patterns in _find_groups(layouts, known_kinds).items():
        names = [name for name in loaded.port_tensors if name_pattern(name) in patterns]
        if not names:
            continue
        try:
            finding = _check_group(kinds, names, loaded)
        except _NotComparableError:
            continue
        compared += kinds
        if finding is not None:
            findings.append(finding)
    return LoadedCheck(findings=tuple(findings), compared=tuple(compared))


def _check_group(kinds: tuple[str, ...], names: Sequence[str], loaded: LoadedPort) -> WeightFinding | None:
    words = word_kinds(kinds)

    def wrong(mistake: WeightMistake, names: Sequence[str], text: str) -> WeightFinding:
        shown = map(name_pattern, names) if len(names) > _MAX_NAMES_LISTED else names
        return WeightFinding(
            mistake=mistake,
            severity=Severity.WRONG,
            kinds=kinds,
            port_tensors=tuple(names),
            text=f"as loaded, {', '.join(dict.fromkeys(shown))} {text}",
        )

    held = {name: loaded.port_tensors[name] for name in names}
    checksums = {name: _Checksum.of(tensor) for name, tensor in held.items()}
    if nonfinite := [name for name in names if checksums[name].num_nonfinite]:
        return wrong(WeightMistake.VALUES, nonfinite, "holds NaN or Inf")
    if zero := [name for name in names if checksums[name].squares == 0]:
        before = loaded.before
        unbound = [name for name in zero if name in before and torch.equal(before[name], held[name])]
        if unbound:
            text = f"holds the zeros of its constructor: {words} never got there"
            return wrong(WeightMistake.NEVER_BOUND, unbound, text)
        return wrong(WeightMistake.ZERO, zero, f"is zero everywhere, where {words} should be")
    dtype = held[names[0]].dtype
    if any(tensor.dtype != dtype for tensor in held.values()):
        raise _NotComparableError
    expected = sum(
        (_Checksum.of(loaded.source[name].to(dtype)) for name in loaded.source if kind_of(name) in kinds),
        _Checksum(),
    )
    found = sum(checksums.values(), _Checksum())
    if found == expected:
        return None
    if found.count != expected.count:
        raise _NotComparableError
    ratio = (found.squares / expected.squares) ** 0.5 if expected.squares else float("inf")
    if abs(ratio - 1) > _RATIO_SLACK:
        text = f"holds {words} scaled: its norm is {ratio:.4g} times that of the checkpoint's"
        return wrong(WeightMistake.SCALED, names, text)
    text = f"holds other numbers than the checkpoint's {words}, of the same norm"
    return wrong(WeightMistake.VALUES, names, text)


def _find_groups(
    layouts: Sequence[TensorLayout], known_kinds: Collection[str]
) -> dict[tuple[str, ...], set[str]]:
    """Return groups of kinds, and the name patterns of the port tensors that together hold all of each group.

    Groups with a known fault, and those with scaled, computed or padded elements, are left out.
    """
    patterns_of: dict[str, set[str]] = {}
    kinds_in: dict[str, set[str]] = {}
    left_out = set(known_kinds)
    for layout in layouts:
        pattern = name_pattern(layout.origin.name)
        for kind in layout.source_kinds:
            kinds_in.setdefault(pattern, set()).add(kind)
            patterns_of.setdefault(kind, set()).add(pattern)
        if not _is_moved_only(layout.origin):
            left_out.update(layout.source_kinds)
    groups: dict[tuple[str, ...], set[str]] = {}
    seen: set[str] = set()
    for first in kinds_in:
        if first in seen:
            continue
        patterns, kinds, waiting = {first}, set[str](), [first]
        while waiting:
            for kind in kinds_in[waiting.pop()]:
                kinds.add(kind)
                waiting.extend(patterns_of[kind] - patterns)
                patterns |= patterns_of[kind]
        seen |= patterns
        if not kinds & left_out:
            groups[tuple(sorted(kinds))] = patterns
    return groups


def _is_moved_only(origin: TensorOrigin) -> bool:
    """Decide whether a port tensor holds nothing but unchanged source elements."""
    has_others = origin.num_computed or origin.num_constant
    return not has_others and (origin.gain, origin.offset, origin.rounding) == (1, 0, 0)
