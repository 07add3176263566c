"""Loaded check: a port that has loaded the checkpoint's own layer, compared with the checkpoint.

A conversion that only moves elements keeps their checksum, whatever their order. So no layout of the true size is
traced. Instead, port tensors are grouped so that each group holds all source tensors of some kinds and nothing else.
The checksum of a group must equal that of these source tensors. A *kind* is the last part of a source tensor's name,
such as `q_proj` or `w1`; a *pattern* is a port tensor's name with `#` for each number, the same for all experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from neuron.weight_trace.port_tensors import name_pattern
from neuron.weight_trace.source_tensors import kind_of, word_kinds
from neuron.weight_trace.tensor_layout import TensorLayout
from neuron.weight_trace.tensor_origin import TensorOrigin
from neuron.weight_trace.value_checksum import ValueChecksum
from neuron.weight_trace.weight_finding import Severity, WeightFinding, WeightMistake

# Norms of the same values in another order agree to 1e-12. A ratio further from 1 than this is a scale.
_RATIO_SLACK = 1e-3
_MAX_NAMES_LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedPort:
    """A port that holds the checkpoint's layer."""

    port_tensors: Mapping[str, torch.Tensor]  # every tensor that the port holds, by name
    # Copies of the small port tensors, by name, as the constructor left them.
    before: Mapping[str, torch.Tensor]
    source: LayerTensors  # the layer in the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheck:
    """Result of the check."""

    findings: tuple[WeightFinding, ...]
    compared: tuple[str, ...]  # kinds of source tensors whose values were all compared


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
    for kinds, patterns in _group_tensors(layouts, known_kinds).items():
        names = [name for name in loaded.port_tensors if name_pattern(name) in patterns]
        if not names:
            # Loading has given these tensors other names.
            continue
        checksums = {name: ValueChecksum.of(loaded.port_tensors[name]) for name in names}
        finding = _find_unusable(kinds, checksums, loaded)
        if finding is None:
            found = sum(checksums.values(), ValueChecksum())
            expected = _expected_checksum(kinds, names, loaded)
            if expected is None or found.count != expected.count:
                # Mixed dtypes, padding or copies: this group cannot be compared.
                continue
            finding = _compare(kinds, names, found=found, expected=expected)
        compared += kinds
        if finding is not None:
            findings.append(finding)
    return LoadedCheck(findings=tuple(findings), compared=tuple(compared))


def _group_tensors(
    layouts: Sequence[TensorLayout], known_kinds: Collection[str]
) -> dict[tuple[str, ...], set[str]]:
    """Return groups of kinds, and for each the name patterns of the port tensors that hold these kinds.

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
    grouped: set[str] = set()
    for first in kinds_in:
        if first in grouped:
            continue
        # Follow kinds to all tensors that hold them, and these tensors to all kinds that they hold.
        patterns, kinds, unvisited = {first}, set[str](), [first]
        while unvisited:
            for kind in kinds_in[unvisited.pop()]:
                kinds.add(kind)
                unvisited.extend(patterns_of[kind] - patterns)
                patterns |= patterns_of[kind]
        grouped |= patterns
        if not kinds & left_out:
            groups[tuple(sorted(kinds))] = patterns
    return groups


def _is_moved_only(origin: TensorOrigin) -> bool:
    """Decide whether a port tensor holds nothing but unchanged source elements."""
    has_others = origin.num_computed or origin.num_constant
    return not has_others and (origin.gain, origin.offset, origin.rounding) == (1, 0, 0)


def _find_unusable(
    kinds: tuple[str, ...], checksums: Mapping[str, ValueChecksum], loaded: LoadedPort
) -> WeightFinding | None:
    """Find port tensors that hold NaN or Inf, or zeros only."""
    if nonfinite := [name for name, checksum in checksums.items() if checksum.num_nonfinite]:
        return _wrong(WeightMistake.VALUES, kinds, nonfinite, "holds NaN or Inf")
    zero = [name for name, checksum in checksums.items() if checksum.squares == 0]
    before, after = loaded.before, loaded.port_tensors
    if unbound := [name for name in zero if name in before and torch.equal(before[name], after[name])]:
        text = f"holds the zeros of its constructor: {word_kinds(kinds)} never got there"
        return _wrong(WeightMistake.NEVER_BOUND, kinds, unbound, text)
    if zero:
        text = f"is zero everywhere, where {word_kinds(kinds)} should be"
        return _wrong(WeightMistake.ZERO, kinds, zero, text)
    return None


def _expected_checksum(
    kinds: tuple[str, ...], names: Sequence[str], loaded: LoadedPort
) -> ValueChecksum | None:
    """Return the checksum of the checkpoint's tensors in the port tensors' dtype; None if these have several."""
    dtypes = {loaded.port_tensors[name].dtype for name in names}
    if len(dtypes) > 1:
        return None
    dtype = dtypes.pop()
    total = ValueChecksum()
    for name in loaded.source:
        if kind_of(name) in kinds:
            total += ValueChecksum.of(loaded.source[name].to(dtype))
    return total


def _compare(
    kinds: tuple[str, ...], names: Sequence[str], *, found: ValueChecksum, expected: ValueChecksum
) -> WeightFinding | None:
    if found == expected:
        return None
    ratio = (found.squares / expected.squares) ** 0.5 if expected.squares else float("inf")
    if abs(ratio - 1) > _RATIO_SLACK:
        text = f"holds {word_kinds(kinds)} scaled: its norm is {ratio:.4g} times that of the checkpoint's"
        return _wrong(WeightMistake.SCALED, kinds, names, text)
    text = f"holds other numbers than the checkpoint's {word_kinds(kinds)}, of the same norm"
    return _wrong(WeightMistake.VALUES, kinds, names, text)


def _wrong(mistake: WeightMistake, kinds: tuple[str, ...], names: Sequence[str], text: str) -> WeightFinding:
    shown = map(name_pattern, names) if len(names) > _MAX_NAMES_LISTED else names
    return WeightFinding(
        mistake=mistake,
        severity=Severity.WRONG,
        kinds=kinds,
        port_tensors=tuple(names),
        text=f"as loaded, {', '.join(dict.fromkeys(shown))} {text}",
    )
