"""Findings: what is wrong with the weights that landed in a port, or looks as if it were."""

from __future__ import annotations

import re
from collections.abc import Sequence as Values

import torch

from neuron.weight_trace.coverage import find_by_count
from neuron.weight_trace.finding import Severity, WeightFinding, WeightMistake
from neuron.weight_trace.layout import PlaceLayout
from neuron.weight_trace.origin import Origin
from neuron.weight_trace.piece import WeightPiece
from neuron.weight_trace.sequences import Order
from neuron.weight_trace.sources import Sources, kinds_of, role

# What float32 may lose and still be float32.
_FLOAT32_SLACK = 2.0**-20
_GAIN_SLACK = 2.0**-8
_NUMBER = re.compile(r"\d+")
# Parts of a place's name that say which kind it holds.
_NAMED_KINDS = {
    **{name: name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "w1", "w2", "w3")},
    **{name: name for name in ("input_layernorm", "post_attention_layernorm", "e_score_correction_bias")},
    "correction_bias": "e_score_correction_bias",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def find_findings(by_rank: Values[Values[PlaceLayout]], sources: Sources) -> list[WeightFinding]:
    """What the layouts of all places show.

    Args:
        by_rank: The layouts of each rank; of several each may hold a copy.
        sources: The layer's tensors.
    """
    found: dict[str, WeightFinding] = {}
    ranks: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(by_rank):
        in_places = [finding for layout in of_rank for finding in _find_in_place(layout)]
        for finding in (*_find_expert_order(of_rank), *in_places):
            found.setdefault(finding.text, finding)
            ranks.setdefault(finding.text, []).append(rank)
    # Ranks that are wrong alike say it once; where only some are, they are named.
    return [
        *find_by_count(by_rank, sources),
        *(
            finding if len(set(ranks[text])) == len(by_rank) else finding.on_ranks(tuple(ranks[text]))
            for text, finding in found.items()
        ),
    ]


def _find_expert_order(layouts: Values[PlaceLayout]) -> list[WeightFinding]:
    """Experts beside each other, or in modules that count them, in another order than their numbers'."""
    by_name: dict[str, list[tuple[list[int], PlaceLayout]]] = {}
    for layout in layouts:
        if layout.experts:
            numbers = [int(number) for number in _NUMBER.findall(layout.origin.name)]
            by_name.setdefault(_NUMBER.sub("#", layout.origin.name), []).append((numbers, layout))
    orders: dict[tuple[int, ...], list[PlaceLayout]] = {}
    for entries in by_name.values():
        entries.sort(key=lambda entry: entry[0])
        experts = tuple(expert for _, layout in entries for expert in layout.experts)
        if list(experts) != sorted(experts):
            orders.setdefault(experts, []).extend(layout for _, layout in entries)
    found = []
    for experts, those in orders.items():
        is_text = list(experts) == sorted(experts, key=str)
        order = (
            "the order of their numbers as text" if is_text else "another order than that of their numbers"
        )
        places = list(dict.fromkeys(_NUMBER.sub("#", layout.origin.name) for layout in those))
        found.append(
            WeightFinding(
                mistake=WeightMistake.ORDER,
                weight=Severity.SUSPECT,
                tensors=tuple(dict.fromkeys(kind for layout in those for kind in _kinds_held(layout))),
                places=tuple(layout.origin.name for layout in those),
                text=f"{', '.join(places)}: experts lie in {order}: {', '.join(map(str, experts[:6]))}, …",
                is_named=True,
            )
        )
    return found


def _find_in_place(layout: PlaceLayout) -> list[WeightFinding]:
    origin, kinds = layout.origin, _kinds_held(layout)

    def finding(
        mistake: WeightMistake, weight: Severity, text: str, *, is_named: bool = False
    ) -> WeightFinding:
        held = kinds or origin.mixed_kinds
        return WeightFinding(
            mistake=mistake,
            weight=weight,
            tensors=held,
            places=(origin.name,),
            text=f"{origin.name}: {text}",
            is_named=is_named,
        )

    found = []
    named = {_NAMED_KINDS[part] for part in origin.name.split(".") if part in _NAMED_KINDS}
    if len(named) == 1 and kinds and not named & set(kinds):
        text = f"is named {role(*named)}, and holds {', '.join(map(role, kinds))}"
        found.append(finding(WeightMistake.SWAPPED, Severity.SUSPECT, text, is_named=True))
    for piece in _first_of_each(layout):
        if not piece.is_in_order:
            found.append(finding(*_disorder(piece)))
    if origin.landed.numel():
        found += [finding(*scale) for scale in _find_scale(origin)]
        found += [finding(*loss) for loss in _find_loss(origin, kinds)]
    if origin.num_computed:
        found.append(finding(WeightMistake.COMPUTED, Severity.SUSPECT, word_computed(origin)))
    return found


def _disorder(piece: WeightPiece) -> tuple[WeightMistake, Severity, str]:
    if piece.source is None:
        return (
            (WeightMistake.TRANSPOSED if piece.is_reshaped else WeightMistake.ORDER),
            Severity.SUSPECT,
            piece.what,
        )
    assert piece.rows is not None, "a piece of a source has rows"
    assert piece.columns is not None, "a piece of a source has columns"
    is_rows = piece.rows.order is not Order.FORWARD
    what, order = ("rows", piece.rows) if is_rows else ("columns", piece.columns)
    verb = "repeated" if order.order is Order.REPEATED else "in another order"
    return WeightMistake.ORDER, Severity.SUSPECT, f"{what} of {role(piece.source.kind)} {verb}: {order}"


def _find_scale(origin: Origin) -> list[tuple[WeightMistake, Severity, str]]:
    if origin.gain is None:
        return [(WeightMistake.SCALED, Severity.SUSPECT, "values are multiplied by different numbers")]
    found = []
    if abs(origin.gain - 1) > _GAIN_SLACK:
        found.append((WeightMistake.SCALED, Severity.SUSPECT, f"values are multiplied by {origin.gain:.4g}"))
    if origin.offset is None or origin.offset != 0:
        added = "different numbers are" if origin.offset is None else f"{origin.offset:g} is"
        found.append((WeightMistake.SCALED, Severity.SUSPECT, f"{added} added to values"))
    return found


def _find_loss(origin: Origin, kinds: tuple[str, ...]) -> list[tuple[WeightMistake, Severity, str]]:
    if origin.rounding_float32 > _FLOAT32_SLACK:
        exact = [kind for kind in kinds if kind in ("gate", "e_score_correction_bias")]
        where = (
            f"is {_word_dtype(origin.dtype)}"
            if origin.dtype != torch.float32
            else (f"was rounded to {_word_bits(origin.rounding_float32)} on the way")
        )
        text = f"{', '.join(map(role, exact))} {where}: the router decides in float32"
        if "e_score_correction_bias" in exact:
            text += ", and near 9 a bfloat16 is 0.06 from the next"
        return [(WeightMistake.DTYPE, Severity.WRONG, text)]
    if origin.rounding > _FLOAT32_SLACK and origin.gain == 1:
        return [(WeightMistake.DTYPE, Severity.NOTE, f"values are rounded to {_word_bits(origin.rounding)}")]
    return []


def word_computed(origin: Origin) -> str:
    """What computed elements are, in words."""
    of = ", ".join(role(kind) for kind in origin.mixed_kinds) or "something"
    share = "values" if origin.num_computed == origin.numbers.numel() else f"{origin.num_computed} values"
    mixed = None if origin.num_mixed is None else round(origin.num_mixed)
    if mixed is not None and mixed > 1 and origin.weight_sum is not None:
        if abs(origin.weight_sum - 1) < _GAIN_SLACK:
            return f"{share} are means of {mixed} elements of {of}"
        if abs(origin.weight_sum - mixed) < _GAIN_SLACK * mixed:
            return f"{share} are sums of {mixed} elements of {of}"
    return f"{share} are computed from {of}"


def _word_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _word_bits(rounding: float) -> str:
    bits = 1
    while 2.0 ** -(bits + 1) > rounding:
        bits += 1
    return "bfloat16" if bits in (8, 9) else f"about {bits} bits"


def _first_of_each(layout: PlaceLayout) -> list[WeightPiece]:
    """One piece of each kind that is out of order, rather than one for every expert."""
    pieces: dict[tuple[str, bool], WeightPiece] = {}
    for piece in layout.pieces:
        kind = piece.source.kind if piece.source is not None else piece.what
        pieces.setdefault((kind, piece.is_in_order), piece)
    return list(pieces.values())


def _kinds_held(layout: PlaceLayout) -> tuple[str, ...]:
    held = kinds_of([piece.source for piece in layout.pieces if piece.source is not None])
    return tuple(dict.fromkeys((*held, *(kind for piece in layout.pieces for kind in piece.torn))))
