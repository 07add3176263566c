"""Layout check: findings from the layouts of a port's tensors, and from the checkpoint's own layer in the port.

The trace runs on generated tensors, mostly of a smaller model. What a conversion does to the checkpoint's own numbers
alone shows once these are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from minimax_tools.capture.manifest import HeldWeights, WeightFault, WeightMistake
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.spec import ModelSpec
from neuron.weight_trace.agreement import (
    Scales,
    Severity,
    WeightFinding,
    find_parted,
    find_scaled,
    find_unlike_experts,
)
from neuron.weight_trace.port_tensors import ELEMENTS_AT_ONCE, name_pattern
from neuron.weight_trace.source_tensors import (
    SHARED_EXPERTS,
    SourceTensor,
    SourceTensors,
    TensorOrigin,
    kind_of,
    kinds_of,
    word_kinds,
    word_sources,
)
from neuron.weight_trace.tensor_layout import Disorder, LayoutSegment, TensorLayout, expert_orders
from reports.wording import word_order

# Norms of the same values in another order agree to 1e-6 in float32. A ratio further from 1 than this is a scale.
_RATIO_SLACK = 1e-3


def check_loaded(
    held: HeldWeights,
    port_tensors: Mapping[str, torch.Tensor],
    own: LayerTensors,
    layouts: Sequence[TensorLayout],
    found: Sequence[WeightFinding],
) -> Iterator[WeightFinding]:
    """Yield the faults of a port that loaded its `own` layer that trace and trial have not `found`.

    `held` is what all ranks hold; `port_tensors` by name and `layouts` are the first rank's.
    """
    wrong = {kind for finding in found if finding.severity is Severity.WRONG for kind in finding.kinds}
    known = {kind for finding in found for kind in finding.kinds}
    for fault in held.faults:
        if not set(fault.kinds) <= (wrong if fault.is_certain else known):
            yield _finding_of(fault)
    told = {kind for fault in held.faults for kind in fault.kinds}
    changed = set(held.not_compared) - wrong - told
    for patterns, kinds in _moved_only(layouts, changed).items():
        yield _compare_norms(kinds, patterns, port_tensors, own)


def number_as_loaded(found: Sequence[WeightFinding], faults: Sequence[WeightFault]) -> list[WeightFinding]:
    """Return the findings of a smaller layer, those on some experts with the experts of the checkpoint's layer."""
    numbered = []
    for finding in found:
        alike = (
            fault
            for fault in faults
            if fault.experts and fault.mistake is finding.mistake and set(fault.kinds) <= set(finding.kinds)
        )
        fault = next(alike, None) if finding.severity is Severity.WRONG else None
        if fault is not None:
            told = f"{finding.text}: {finding.details}" if finding.details else finding.text
            finding = replace(finding, text=fault.text, details=f"in the smaller layer, {told}")
        numbered.append(finding)
    return numbered


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


def _compare_norms(
    kinds: tuple[str, ...],
    patterns: tuple[str, ...],
    port_tensors: Mapping[str, torch.Tensor],
    own: LayerTensors,
) -> WeightFinding:
    """Tell a scale from other numbers, by the norm of all that lies in some tensors."""
    names = [name for name in port_tensors if name_pattern(name) in patterns]
    held = _norm(port_tensors[name] for name in names)
    expected = _norm(own[name] for name in own if kind_of(name) in kinds)
    ratio = held / expected
    is_scaled = abs(ratio - 1) > _RATIO_SLACK
    words = word_kinds(kinds, own.reader.index.stored_names)
    what = f"scaled: its norm is {ratio:.4g} times the checkpoint's" if is_scaled else "in other numbers"
    return WeightFinding(
        mistake=WeightMistake.SCALED if is_scaled else WeightMistake.VALUES,
        severity=Severity.WRONG,
        kinds=kinds,
        port_tensors=tuple(names),
        text=f"as loaded, {', '.join(patterns)} holds {words} {what}",
    )


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.float().norm()) ** 2 for tensor in tensors))


# Relative rounding up to 8 float32 steps (2⁻²³) still counts as float32: a scale and its inverse cost a few.
_FLOAT32_SLACK = 2.0**-20
# A gain is read from BF16 values: within one BF16 step (2⁻⁸) of 1 it is 1.
_GAIN_SLACK = 2.0**-8
# Parts of a port tensor's name, and the kind that each says the tensor holds.
_NAMED_KINDS = {
    **{kind: kind for kind in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "w1", "w2", "w3")},
    **{kind: kind for kind in ("input_layernorm", "post_attention_layernorm", "e_score_correction_bias")},
    **{"correction_bias": "e_score_correction_bias", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
}
# Kinds of experts' matrices, as those of other MLPs are named.
_MLP_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def check_layouts(
    by_rank: Sequence[Sequence[TensorLayout]], sources: SourceTensors, spec: ModelSpec, scales: Scales
) -> list[WeightFinding]:
    """Return all findings of the layouts of each rank's port tensors, in rank order."""
    findings, held = [*_find_by_count(by_rank, sources), *find_scaled(scales)], kinds_of(sources.all)
    ranks_with: dict[WeightFinding, set[int]] = {}
    for rank, layouts in enumerate(by_rank):
        of_rank = [
            *_find_expert_order(layouts),
            *find_unlike_experts(layouts, sources),
            *find_parted(layouts, spec),
        ]
        for layout in layouts:
            of_rank += _find_in_tensor(layout, sources, held)
        for finding in of_rank:
            ranks_with.setdefault(finding, set()).add(rank)
    for finding, ranks in ranks_with.items():
        is_on_all = len(ranks) == len(by_rank)
        on_ranks = "" if is_on_all else f" (on rank {', '.join(map(str, sorted(ranks)))})"
        findings.append(replace(finding, text=f"{finding.text}{on_ranks}"))
    return findings


def find_refills(
    layouts: Sequence[TensorLayout], sources: SourceTensors, missing: Collection[str]
) -> dict[str, str]:
    """Return port tensors that never got their weight, each with the weight's name.

    Their own name says the kind, which is among the `missing` ones, and their shape is the weight's.
    """
    refills = {}
    held = kinds_of(sources.all)
    for layout in layouts:
        for kind in _named_kinds(layout.origin, held) & set(missing):
            of_kind = [source for source in sources.all if source.kind == kind]
            if len(of_kind) == 1 and of_kind[0].shape == tuple(layout.origin.shape):
                refills[layout.origin.name] = of_kind[0].name
    return refills


def _find_by_count(
    by_rank: Sequence[Sequence[TensorLayout]], sources: SourceTensors
) -> Iterator[WeightFinding]:
    """Yield source tensors that land nowhere; without other ranks, which may hold copies, also those landing twice."""
    layouts = [layout for of_rank in by_rank for layout in of_rank]
    counts = _count(layouts, sources)
    missing = list(_find_missing(counts, layouts))
    yield from missing
    if len(by_rank) == 1:
        yield from _find_duplicated(counts, {kind for finding in missing for kind in finding.kinds}, layouts)


def _count(layouts: Sequence[TensorLayout], sources: SourceTensors) -> dict[SourceTensor, torch.Tensor]:
    """Count how often each element of each source tensor lands, int16."""
    counts = torch.zeros(sources.size, dtype=torch.int16)
    for layout in layouts:
        for chunk in layout.origin.numbers.reshape(-1).split(ELEMENTS_AT_ONCE):
            # Numbers of source elements; negative ones mark constant, computed and untraced elements.
            landed = chunk[chunk >= 0]
            counts.index_add_(0, landed, torch.ones(len(landed), dtype=torch.int16))
    return {source: counts[source.start : source.start + source.size] for source in sources.all}


def _find_missing(
    counts: dict[SourceTensor, torch.Tensor], layouts: Sequence[TensorLayout]
) -> Iterator[WeightFinding]:
    # Elements of these kinds may have gone into computed values, and then lie nowhere themselves.
    computed = {kind for layout in layouts for kind in layout.origin.mixed_kinds}
    num_lost = {
        source: int((count == 0).sum()) for source, count in counts.items() if source.kind not in computed
    }
    missing = [source for source, lost in num_lost.items() if lost == source.size]
    landed = {source.kind for source in num_lost if source not in missing}
    # A port may hold a whole kind where torch shows no tensor, but not some experts alone.
    for severity, group in (
        (Severity.WRONG, [source for source in missing if source.kind in landed]),
        (Severity.SUSPECT, [source for source in missing if source.kind not in landed]),
    ):
        if group:
            yield _missing(group, severity, [layout.origin for layout in layouts])
    for source, lost in num_lost.items():
        if 0 < lost < source.size:
            yield WeightFinding(
                mistake=WeightMistake.MISSING,
                severity=Severity.WRONG,
                kinds=(source.kind,),
                text=f"missing: {lost} of {source.size} elements of {word_sources([source])} land nowhere",
            )


def _missing(
    missing: Sequence[SourceTensor], severity: Severity, origins: Sequence[TensorOrigin]
) -> WeightFinding:
    # A port tensor that the missing one should have filled is constant, and has its shape.
    shapes = {source.shape for source in missing}
    constants = [
        origin
        for origin in origins
        if origin.num_constant == origin.numbers.numel() and origin.shape in shapes
    ]
    return WeightFinding(
        mistake=WeightMistake.MISSING,
        severity=severity,
        kinds=kinds_of(missing),
        port_tensors=tuple(origin.name for origin in constants),
        text=f"missing: {word_sources(missing)} {_lands(missing)} nowhere"
        + "".join(f"; {_word_constant(origin)}" for origin in constants),
    )


def _word_constant(origin: TensorOrigin) -> str:
    held = "what its constructor gave it" if origin.constant is None else f"{origin.constant:g} everywhere"
    return f"{origin} was never bound: it holds {held}"


def _find_duplicated(
    counts: dict[SourceTensor, torch.Tensor], missing_kinds: set[str], layouts: Sequence[TensorLayout]
) -> Iterator[WeightFinding]:
    """Yield copies as wrong if others of their kind are missing, else as notes."""
    num_copies = {source: int(count.max()) for source, count in counts.items()}
    duplicated = [source for source, copies in num_copies.items() if copies > 1]
    for is_wrong in (True, False):
        group = [source for source in duplicated if (source.kind in missing_kinds) == is_wrong]
        if not group:
            continue
        most = max(num_copies[source] for source in group)
        times = "twice" if most == 2 else f"{most} times"
        names = {source.name for source in group}
        yield WeightFinding(
            mistake=WeightMistake.DUPLICATED,
            severity=Severity.WRONG if is_wrong else Severity.NOTE,
            kinds=kinds_of(group),
            port_tensors=tuple(
                layout.origin.name
                for layout in layouts
                if any(segment.source and segment.source.name in names for segment in layout.segments)
            ),
            text=f"duplicated: {word_sources(group)} {_lands(group)} {times}"
            + (", where others of the kind land nowhere" if is_wrong else ""),
        )


def _lands(sources: Sequence[SourceTensor]) -> str:
    return "lands" if len(sources) == 1 else "land"


def _find_expert_order(layouts: Sequence[TensorLayout]) -> Iterator[WeightFinding]:
    """Yield orders of experts other than by number, within a port tensor or over modules numbered by expert."""
    orders: dict[tuple[int, ...], list[TensorLayout]] = {}
    # Tensors of one name pattern, in the order of their names, and the numbers of the experts that they hold.
    for group, experts in expert_orders(layouts):
        if list(experts) != sorted(experts):
            orders.setdefault(experts, []).extend(group)
    for experts, group in orders.items():
        names = dict.fromkeys(name_pattern(layout.origin.name) for layout in group)
        yield WeightFinding(
            mistake=WeightMistake.ORDER,
            kinds=tuple(dict.fromkeys(kind for layout in group for kind in _kinds_held(layout))),
            port_tensors=tuple(layout.origin.name for layout in group),
            text=f"{', '.join(names)}: {word_order(experts, noun='experts')}",
            # Names or positions count the experts, and another expert lies there.
            contradicts_names=True,
        )


def _find_in_tensor(
    layout: TensorLayout, sources: SourceTensors, held: Sequence[str]
) -> Iterator[WeightFinding]:
    origin, kinds = layout.origin, _kinds_held(layout)

    def fault(
        mistake: WeightMistake,
        text: str,
        severity: Severity = Severity.SUSPECT,
        *,
        contradicts_names: bool = False,
    ) -> WeightFinding:
        return WeightFinding(
            mistake=mistake,
            severity=severity,
            kinds=kinds or origin.mixed_kinds,
            port_tensors=(origin.name,),
            text=f"{origin.name}: {text}",
            contradicts_names=contradicts_names,
        )

    named = _named_kinds(origin, held)
    if len(named) == 1 and kinds and not named & set(kinds):
        text = f"is named {sources.word(named)}, and holds {sources.word(kinds)}"
        yield fault(WeightMistake.SWAPPED, text, contradicts_names=True)
    # One finding for each kind, not for each expert.
    disordered: dict[str, LayoutSegment] = {}
    for segment in layout.segments:
        if not segment.is_in_order:
            disordered.setdefault(segment.source.kind if segment.source else segment.description, segment)
    for segment in disordered.values():
        yield fault(*_word_disorder(segment))
    if origin.has_landed:
        # Several factors in one tensor are found kind by kind, by `find_scaled`.
        if origin.gain is not None and abs(origin.gain - 1) > _GAIN_SLACK:
            yield fault(WeightMistake.SCALED, f"values are multiplied by {origin.gain:.4g}")
        if origin.offset != 0:
            added = "different numbers are" if origin.offset is None else f"{origin.offset:g} is"
            yield fault(WeightMistake.SCALED, f"{added} added to values")
        if origin.rounding_float32 > _FLOAT32_SLACK:
            yield fault(WeightMistake.DTYPE, _word_rounded_router(origin, kinds, sources), Severity.WRONG)
        # A scale rounds too, and has a finding of its own.
        elif origin.rounding > _FLOAT32_SLACK and origin.gain == 1:
            text = f"values are rounded to {_word_bits(origin.rounding)}"
            yield fault(WeightMistake.DTYPE, text, Severity.NOTE)
    if origin.num_computed:
        yield fault(WeightMistake.COMPUTED, _word_computed(origin, sources))


def _named_kinds(origin: TensorOrigin, kinds: Sequence[str]) -> set[str]:
    """Return the kinds that a port tensor's name says it holds, of a layer with these `kinds`."""
    parts = origin.name.split(".")
    return {_named_kind(parts, _NAMED_KINDS[part], kinds) for part in parts if part in _NAMED_KINDS}


def _named_kind(parts: Sequence[str], kind: str, kinds: Sequence[str]) -> str:
    """Return the kind that is meant by a name that speaks of `kind`: it may be that of a bias, or of another MLP."""
    matrix = _MLP_MATRICES.get(kind, kind)
    meant = {
        f"{kind}.bias": parts[-1] == "bias",
        f"{SHARED_EXPERTS}.{matrix}": any(part.startswith("shared_") for part in parts),
        f"index_{kind}": "indexer" in parts,
        matrix: kind not in kinds,
    }
    return next((other for other, is_meant in meant.items() if is_meant and other in kinds), kind)


def _word_disorder(segment: LayoutSegment) -> tuple[WeightMistake, str]:
    if segment.source is None or segment.rows is None or segment.columns is None:
        is_reshaped = segment.disorder is Disorder.RESHAPED
        mistake = WeightMistake.TRANSPOSED if is_reshaped else WeightMistake.ORDER
        return mistake, f"{segment.within}{segment.description}"
    unit, sequence = ("columns", segment.columns) if segment.rows.is_ascending else ("rows", segment.rows)
    order = "repeated" if sequence.is_repeated else "in another order"
    return WeightMistake.ORDER, f"{unit} of {segment.source.word} {order}: {sequence}"


def _word_rounded_router(origin: TensorOrigin, kinds: tuple[str, ...], sources: SourceTensors) -> str:
    router_kinds = [kind for kind in kinds if kind in ("gate", "e_score_correction_bias")]
    rounded = (
        f"is {str(origin.dtype).removeprefix('torch.')}"
        if origin.dtype != torch.float32
        else f"was rounded to {_word_bits(origin.rounding_float32)} on the way"
    )
    text = f"{sources.word(router_kinds)} {rounded}: the router decides in float32"
    if "e_score_correction_bias" in router_kinds:
        text += ", and near 9, where the bias lies, a bfloat16 is 0.06 from the next"
    return text


def _word_computed(origin: TensorOrigin, sources: SourceTensors) -> str:
    kinds = sources.word(origin.mixed_kinds) or "something"
    share = "values" if origin.num_computed == origin.numbers.numel() else f"{origin.num_computed} values"
    mixed = origin.num_mixed or 0
    if mixed > 1 and origin.weight_sum is not None:
        if abs(origin.weight_sum - 1) < _GAIN_SLACK:
            return f"{share} are means of {mixed} elements of {kinds}"
        if abs(origin.weight_sum - mixed) < _GAIN_SLACK * mixed:
            return f"{share} are sums of {mixed} elements of {kinds}"
    return f"{share} are computed from {kinds}"


def _word_bits(rounding: float) -> str:
    """Return the format whose largest relative rounding error this is."""
    bits = 1
    while 2.0 ** -(bits + 1) > rounding:
        bits += 1
    # bfloat16 has 8 bits. The largest error among few elements may be a little smaller, which gives 9.
    return "bfloat16" if bits in (8, 9) else f"about {bits} bits"


def _kinds_held(layout: TensorLayout) -> tuple[str, ...]:
    disordered = (kind for segment in layout.segments for kind in segment.disordered_kinds)
    return tuple(dict.fromkeys((*layout.source_kinds, *disordered)))
