"""Repairs: changes to the tensors that a port's conversion receives, each the inverse of a known mistake.

A conversion that swaps two tensors gives the right result on swapped input. So a repair proves a mistake without
knowledge of the layout that the port's forward expects: with the repair, the layer's output is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from minimax_tools.capture.manifest import WeightMistake
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expert_weight
from neuron.weight_trace.agreement import ExpertMatrices, Scales, group_experts, word_factors, word_unlike
from neuron.weight_trace.source_tensors import LazyTensors, SourceTensors, Tensors, stored_kind, word_kinds
from neuron.weight_trace.tensor_layout import Disorder, TensorLayout, expert_orders
from reports.wording import word_order

# Returns the tensors that a repair changes, and no others.
Change = Callable[[Tensors], Tensors]

# Gate and up of experts, of a dense MLP and of shared experts.
_GATE_UP_PAIRS = (
    ("w1", "w3"),
    ("gate_proj", "up_proj"),
    ("shared_experts.gate_proj", "shared_experts.up_proj"),
)
# Kinds of source tensors that may be taken for each other; only pairs of equal shape are tried.
_SWAPPED_PAIRS = (
    *_GATE_UP_PAIRS,
    ("k_proj", "v_proj"),
    ("q_norm", "k_norm"),
    ("q_proj", "k_proj"),
    ("input_layernorm", "post_attention_layernorm"),
    ("k_proj.bias", "v_proj.bias"),
    ("q_proj.bias", "k_proj.bias"),
)
# Groups of experts that lie alike, of which each is tried as the right one.
_MOST_MODELS = 2
# Kinds whose rows rotate: a port may mistake their order in queries and keys, or in either alone. The weights of the
# norms, and biases, lie in the order of the projections' rows.
_ROTARY_KINDS = (
    ("q_proj", "k_proj", "q_norm", "k_norm", "q_proj.bias", "k_proj.bias"),
    ("q_proj", "q_norm", "q_proj.bias"),
    ("k_proj", "k_norm", "k_proj.bias"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A change to a conversion's input."""

    mistake: WeightMistake  # the kind of mistake in the conversion that the repair undoes
    kinds: tuple[str, ...]  # kinds of the source tensors that it changes, such as `w1`
    text: str  # the mistake in words
    change: Change  # returns the changed tensors, each made on access

    def apply(self, tensors: Tensors) -> Tensors:
        """Return all tensors of a layer, those that the repair changes in their changed form."""
        changed = self.change(tensors)
        return LazyTensors(tensors, lambda name: (changed if name in changed else tensors)[name])


def candidate_repairs(
    by_rank: Sequence[Sequence[TensorLayout]],
    sources: SourceTensors,
    spec: ModelSpec,
    scales: Scales | None = None,
) -> list[Repair]:
    """Return the repairs worth a trial.

    All ranks run the same conversion, so the first one's layouts show most mistakes. `sources` are all tensors of the
    layer; without `scales`, some of them were not traced.
    """
    layouts = by_rank[0]
    return [
        *_undo_swaps(sources),
        *_undo_transpositions(layouts, sources),
        *_undo_expert_orders(layouts, spec),
        *_undo_row_orders(layouts, sources),
        *_undo_rotary_orders(sources, spec),
        *_undo_turns(sources),
        *_undo_scales(layouts, sources),
        *([] if scales is None else [*_undo_factors(scales), *_take_scales(scales)]),
        *([] if scales is None else _align_experts(by_rank, sources)),
    ]


def _undo_swaps(sources: SourceTensors) -> Iterator[Repair]:
    shapes = {source.kind: source.shape for source in sources.all}
    for pair in _SWAPPED_PAIRS:
        if set(pair) <= shapes.keys() and shapes[pair[0]] == shapes[pair[1]]:
            first, second = (_names(sources, kind) for kind in pair)
            yield Repair(
                mistake=WeightMistake.SWAPPED,
                kinds=pair,
                text=f"{' and '.join(sources.word([kind]) for kind in pair)} are swapped",
                change=_rename(dict(zip(first + second, second + first, strict=True))),
            )


def _undo_transpositions(layouts: Sequence[TensorLayout], sources: SourceTensors) -> Iterator[Repair]:
    """Yield repairs for reshaped matrices, and for square ones, whose shape shows no transposition."""
    reshaped = {
        kind
        for layout in layouts
        for segment in layout.segments
        if segment.disorder is Disorder.RESHAPED
        for kind in segment.disordered_kinds
    }
    shapes = {source.kind: source.shape for source in sources.all if len(source.shape) == 2}
    for kind, shape in shapes.items():
        changes: list[Callable[[torch.Tensor], torch.Tensor]] = []
        if kind in reshaped:
            # The conversion reshapes [R,C] to [C,R], and should transpose.
            changes.append(lambda tensor: tensor.T.reshape(tensor.shape))
            # It transposes to [C,R] and reshapes back to [R,C], and should do neither.
            changes.append(lambda tensor: tensor.reshape(tensor.T.shape).T)
        elif shape[0] == shape[1]:
            # It does not transpose and should, or the reverse.
            changes.append(lambda tensor: tensor.T)
        for change in changes:
            yield Repair(
                mistake=WeightMistake.TRANSPOSED,
                kinds=(kind,),
                text=f"{sources.word([kind])} is not transposed as the port's forward wants it",
                change=_change_each(sources, [kind], change),
            )


def _undo_expert_orders(layouts: Sequence[TensorLayout], spec: ModelSpec) -> Iterator[Repair]:
    kinds_by_order: dict[tuple[int, ...], set[str]] = {}
    in_order = tuple(range(spec.num_local_experts))
    # A group is the port's tensors `experts.0.w2`, `experts.1.w2` …; `experts` are those whose weights landed there.
    for group, experts in expert_orders(layouts):
        if experts != in_order and tuple(sorted(experts)) == in_order:
            kinds_by_order.setdefault(experts, set()).update(*(layout.source_kinds for layout in group))
    for experts, unsorted_kinds in kinds_by_order.items():
        kinds = tuple(sorted(unsorted_kinds))
        # The port puts `expert` at `position`, where the expert of that number belongs: hand it that one's weights.
        partners = {
            expert_weight(expert, kind): expert_weight(position, kind)
            for position, expert in enumerate(experts)
            for kind in kinds
        }
        yield Repair(
            mistake=WeightMistake.ORDER,
            kinds=kinds,
            text=f"{word_kinds(kinds, spec.family.stored_names)}: {word_order(experts, noun='experts')}",
            change=_rename(partners),
        )


def _undo_row_orders(layouts: Sequence[TensorLayout], sources: SourceTensors) -> Iterator[Repair]:
    orders: dict[str, torch.Tensor] = {}
    for layout in layouts:
        for segment in layout.segments:
            if segment.source is None or segment.rows is None or segment.rows.is_ascending:
                continue
            rows = segment.rows.indices
            # An order can be undone if it holds every row, and each once.
            if len(rows) == segment.source.shape[0] == len(rows.unique()):
                # The first order of a kind is undone for all experts: a conversion treats them alike.
                orders.setdefault(segment.source.kind, rows)
    for kind, rows in orders.items():
        yield Repair(
            mistake=WeightMistake.ORDER,
            kinds=(kind,),
            text=f"rows of {sources.word([kind])} lie in another order",
            change=_change_each(sources, [kind], partial(_take_rows, rows=rows.argsort())),
        )


def _undo_rotary_orders(sources: SourceTensors, spec: ModelSpec) -> Iterator[Repair]:
    """Yield repairs for rotated rows in halves that the forward takes for pairs, and for the reverse.

    The rows that rotate together are 0 and `half`, 1 and `half + 1` in halves; 0 and 1, 2 and 3 in pairs.
    """
    half = spec.rotary_dim // 2
    unrotated = torch.arange(spec.rotary_dim, spec.head_dim)
    halves_to_pairs = torch.cat((torch.arange(spec.rotary_dim).reshape(2, half).T.flatten(), unrotated))
    pairs_to_halves = halves_to_pairs.argsort()
    for order, laid_out, taken in (
        (halves_to_pairs, "halves", "pairs"),
        (pairs_to_halves, "pairs", "halves"),
    ):
        for rotary in _ROTARY_KINDS:
            kinds = tuple(kind for kind in rotary if _names(sources, kind))
            yield Repair(
                mistake=WeightMistake.ORDER,
                kinds=kinds,
                text=f"rotated rows of {', '.join(kinds)} lie in {laid_out}, and the forward takes them for {taken}",
                change=_change_each(sources, kinds, partial(_reorder_heads, order=order)),
            )


def _undo_turns(sources: SourceTensors) -> Iterator[Repair]:
    """Yield repairs for rows of gate and up that take turns where the forward cuts halves, and for the reverse."""
    for pair in _GATE_UP_PAIRS:
        gates, ups = (_names(sources, kind) for kind in pair)
        if not gates:
            continue
        rows = f"rows of {' and '.join(sources.word([kind]) for kind in pair)}"
        for text, change in (
            (f"{rows} take turns, and the forward takes them for halves", _halves_to_turns),
            (f"{rows} lie in halves, and the forward lets them take turns", _turns_to_halves),
        ):
            yield Repair(
                mistake=WeightMistake.ORDER,
                kinds=pair,
                text=text,
                change=_change_pairs(dict(zip(gates, ups, strict=True)), change),
            )


def _undo_scales(layouts: Sequence[TensorLayout], sources: SourceTensors) -> Iterator[Repair]:
    texts = set()
    for layout in layouts:
        gain, offset = layout.origin.gain, layout.origin.offset
        # None: it differs between elements, so no single number undoes it; or nothing of the checkpoint landed.
        if gain is None or offset is None or (gain, offset) == (1, 0):
            continue
        changes = [f"multiplied by {gain:.4g}"] if gain != 1 else []
        changes += [f"shifted by {offset:g}"] if offset != 0 else []
        for kind in layout.source_kinds:
            text = f"{sources.word([kind])} is {' and '.join(changes)}"
            if text not in texts:
                texts.add(text)
                yield Repair(
                    mistake=WeightMistake.SCALED,
                    kinds=(kind,),
                    text=text,
                    change=_change_each(sources, [kind], partial(_unscale, gain=gain, offset=offset)),
                )


def _undo_factors(scales: Scales) -> Iterator[Repair]:
    """Yield repairs for kinds whose elements are multiplied by several numbers."""
    factors = {source.name: scales.of_source(source) for source in scales.sources.all}
    for kind in scales.scaled:
        yield Repair(
            mistake=WeightMistake.SCALED,
            kinds=(kind,),
            text=f"{scales.sources.word([kind])} is multiplied by {word_factors(scales.of_kind(kind))}",
            change=_multiply({name: 1 / factors[name] for name in _names(scales.sources, kind)}),
        )


def _take_scales(scales: Scales) -> Iterator[Repair]:
    """Yield repairs for tensors that read scaled channels, and did not take the scale."""
    for moved in scales.moved:
        giver = stored_kind(moved.giver, scales.sources.names)
        for kind in moved.missing:
            inverse = {
                name: 1 / moved.read[number if len(moved.read) > 1 else 0]
                for number, name in enumerate(_names(scales.sources, kind))
            }
            yield Repair(
                mistake=WeightMistake.SCALED,
                kinds=(kind,),
                text=f"{scales.sources.word([kind])} does not take the scale that {giver} gave away, as "
                f"{scales.sources.word(moved.takers)} {'does' if len(moved.takers) == 1 else 'do'}",
                change=_multiply(inverse),
            )


def _align_experts(by_rank: Sequence[Sequence[TensorLayout]], sources: SourceTensors) -> Iterator[Repair]:
    """Yield repairs for experts that lie otherwise than others on the first rank: as the largest group, or another."""
    if len(by_rank) > 1:
        return
    groups = group_experts(by_rank[0], sources)
    if len(groups) < 2:
        return
    for model in groups[:_MOST_MODELS]:
        unlike = [group for group in groups if group is not model]
        moved = [expert for group in unlike for expert in group]
        held, wanted = _match(moved, model[0], sources)
        yield Repair(
            mistake=WeightMistake.ORDER,
            kinds=tuple(dict.fromkeys(kind for expert in moved for kind in expert.kinds_in(expert.matrices))),
            text="; ".join(word_unlike(group, model, sources) for group in unlike),
            change=_move(sources, held, wanted),
        )


def _match(
    experts: Sequence[ExpertMatrices], model: ExpertMatrices, sources: SourceTensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of some experts, and those that would lie there as the model lies: numbers of both, [n]."""
    held, wanted = [], []
    for expert in experts:
        expected = model.numbers_of(expert.expert, sources)
        for pattern, numbers in expert.numbers.items():
            if pattern in expected and expected[pattern].shape == numbers.shape:
                both = (numbers >= 0) & (expected[pattern] >= 0)
                held.append(numbers[both])
                wanted.append(expected[pattern][both])
    return torch.cat(held), torch.cat(wanted)


def _move(sources: SourceTensors, held: torch.Tensor, wanted: torch.Tensor) -> Change:
    """Return the change that puts, in the place of each element in `held`, the one of the same index in `wanted`."""
    indices = sources.find(held)
    moves = {}
    for index in indices.unique().tolist():
        source, is_here = sources.all[index], indices == index
        moves[source.name] = held[is_here] - source.start, wanted[is_here]

    def change(name: str, tensors: Tensors) -> torch.Tensor:
        places, numbers = moves[name]
        given = tensors[name]
        moved: torch.Tensor = given.flatten().clone()
        wanted_from = sources.find(numbers)
        for index in wanted_from.unique().tolist():
            source, is_of_source = sources.all[index], wanted_from == index
            moved[places[is_of_source]] = tensors[source.name].flatten()[numbers[is_of_source] - source.start]
        return moved.reshape(given.shape)

    return lambda tensors: LazyTensors(moves, lambda name: change(name, tensors))


def _take_rows(tensor: torch.Tensor, *, rows: torch.Tensor) -> torch.Tensor:
    return tensor[rows]


def _halves_to_turns(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two matrices whose rows, taken in turns, are those of gate and then those of up."""
    rows = torch.cat((gate, up))
    return rows[0::2], rows[1::2]


def _turns_to_halves(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two matrices whose rows, one matrix behind the other, are those of gate and up in turns."""
    first, second = torch.stack((gate, up), dim=1).flatten(0, 1).chunk(2)
    return first, second


def _reorder_heads(tensor: torch.Tensor, *, order: torch.Tensor) -> torch.Tensor:
    """Reorder the rows of every head; `order` holds the row numbers of one head."""
    reordered: torch.Tensor = tensor.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
    return reordered


def _unscale(tensor: torch.Tensor, *, gain: float, offset: float) -> torch.Tensor:
    return (tensor - offset) / gain


def _rename(partners: Mapping[str, str]) -> Change:
    """Return the change that hands out, under each name, the tensor of the partner's name."""
    return lambda tensors: LazyTensors(partners, lambda name: tensors[partners[name]])


def _change_each(
    sources: SourceTensors, kinds: Sequence[str], change: Callable[[torch.Tensor], torch.Tensor]
) -> Change:
    """Return the change that applies a function to every tensor of the kinds."""
    names = [name for kind in kinds for name in _names(sources, kind)]
    return lambda tensors: LazyTensors(names, lambda name: change(tensors[name]))


def _change_pairs(
    partners: Mapping[str, str],
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Change:
    """Return the change that applies a function to every pair of tensors, given by names."""
    places = {name: (pair, place) for pair in partners.items() for place, name in enumerate(pair)}

    def make(name: str, tensors: Tensors) -> torch.Tensor:
        (first, second), place = places[name]
        return change(tensors[first], tensors[second])[place]

    return lambda tensors: LazyTensors(places, lambda name: make(name, tensors))


def _multiply(factors: Mapping[str, torch.Tensor]) -> Change:
    """Return the change that multiplies tensors, by name, by factors."""
    return lambda tensors: LazyTensors(factors, lambda name: tensors[name] * factors[name])


def _names(sources: SourceTensors, kind: str) -> list[str]:
    return [source.name for source in sources.all if source.kind == kind]
