"""Loaded check: findings from the checkpoint's own layer, loaded into the port, beyond those of the trace.

The trace runs on generated tensors, mostly of a smaller model. What a conversion does to the checkpoint's own numbers
alone shows here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from minimax_tools.capture.manifest import HeldWeights, WeightFault, WeightMistake
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from neuron.weight_trace.port_tensors import name_pattern
from neuron.weight_trace.source_tensors import kind_of, word_kinds
from neuron.weight_trace.tensor_layout import TensorLayout
from neuron.weight_trace.tensor_origin import TensorOrigin
from neuron.weight_trace.weight_finding import Severity, WeightFinding

# Norms of the same values in another order agree to 1e-6 in float32. A ratio further from 1 than this is a scale.
_RATIO_SLACK = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedLayer:
    """The checkpoint's layer in the port."""

    held: HeldWeights  # what all ranks hold
    port_tensors: Mapping[str, torch.Tensor]  # tensors of the first rank, by name
    source: LayerTensors


def check_loaded(
    loaded: LoadedLayer, layouts: Sequence[TensorLayout], found: Sequence[WeightFinding]
) -> Iterator[WeightFinding]:
    """Yield the faults of a loaded port that the trace has not found.

    Args:
        loaded: The port.
        layouts: Layouts of the first rank's tensors, traced.
        found: Findings of the trace and the trial.
    """
    wrong = {kind for finding in found if finding.severity is Severity.WRONG for kind in finding.kinds}
    known = {kind for finding in found for kind in finding.kinds}
    for fault in loaded.held.faults:
        if not set(fault.kinds) <= (wrong if fault.is_certain else known):
            yield _finding_of(fault)
    told = {kind for fault in loaded.held.faults for kind in fault.kinds}
    changed = set(loaded.held.not_compared) - wrong - told
    for patterns, kinds in _moved_only(layouts, changed).items():
        yield _compare_norms(kinds, patterns, loaded)


def number_as_loaded(
    found: Sequence[WeightFinding], faults: Sequence[WeightFault]
) -> Sequence[WeightFinding]:
    """Return the findings of a smaller layer, those on some experts with the experts of the checkpoint's layer."""
    return [_number(finding, faults) for finding in found]


def _number(finding: WeightFinding, faults: Sequence[WeightFault]) -> WeightFinding:
    alike = (
        fault
        for fault in faults
        if fault.experts and fault.mistake is finding.mistake and set(fault.kinds) <= set(finding.kinds)
    )
    fault = next(alike, None)
    if fault is None or finding.severity is not Severity.WRONG:
        return finding
    told = f"{finding.text}: {finding.details}" if finding.details else finding.text
    return replace(finding, text=fault.text, details=f"in the smaller layer, {told}")


def _finding_of(fault: WeightFault) -> WeightFinding:
    is_wrong = fault.is_certain or fault.is_exception
    return WeightFinding(
        mistake=fault.mistake,
        severity=Severity.WRONG if is_wrong else Severity.SUSPECT,
        kinds=fault.kinds,
        text=f"as loaded, {fault.text}",
    )


def _moved_only(
    layouts: Sequence[TensorLayout], changed: Collection[str]
) -> Mapping[tuple[str, ...], tuple[str, ...]]:
    """Return the changed kinds by the tensors that hold them, if all of these are made of moved elements alone."""
    of_kind: dict[str, list[TensorOrigin]] = {}
    for layout in layouts:
        for kind in layout.source_kinds:
            of_kind.setdefault(kind, []).append(layout.origin)
    kinds_in: dict[tuple[str, ...], tuple[str, ...]] = {}
    for kind, origins in of_kind.items():
        if kind in changed and all(map(_is_moved_only, origins)):
            patterns = tuple(dict.fromkeys(name_pattern(origin.name) for origin in origins))
            kinds_in[patterns] = (*kinds_in.get(patterns, ()), kind)
    return kinds_in


def _is_moved_only(origin: TensorOrigin) -> bool:
    """Decide whether a port tensor holds nothing but unchanged source elements."""
    has_others = origin.num_computed or origin.num_constant
    return not has_others and (origin.gain, origin.offset, origin.rounding) == (1, 0, 0)


def _compare_norms(kinds: tuple[str, ...], patterns: tuple[str, ...], loaded: LoadedLayer) -> WeightFinding:
    """Tell a scale from other numbers, by the norm of all that lies in some tensors."""
    names = [name for name in loaded.port_tensors if name_pattern(name) in patterns]
    held = _norm(loaded.port_tensors[name] for name in names)
    expected = _norm(loaded.source[name] for name in loaded.source if kind_of(name) in kinds)
    ratio = held / expected
    is_scaled = abs(ratio - 1) > _RATIO_SLACK
    what = f"scaled: its norm is {ratio:.4g} times the checkpoint's" if is_scaled else "in other numbers"
    return WeightFinding(
        mistake=WeightMistake.SCALED if is_scaled else WeightMistake.VALUES,
        severity=Severity.WRONG,
        kinds=kinds,
        port_tensors=tuple(names),
        text=f"as loaded, {', '.join(patterns)} holds {word_kinds(kinds)} {what}",
    )


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.float().norm()) ** 2 for tensor in tensors))
