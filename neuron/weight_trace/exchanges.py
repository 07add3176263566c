"""Exchanges: tensors handed to a port's conversion in another way, each the inverse of a known mistake.

What a conversion swapped comes out right where it is handed swapped tensors. So a mistake is proved without knowing
which layout the port's forward wants: with its inverse the layer's output is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expert_weight
from neuron.weight_trace.finding import WeightMistake
from neuron.weight_trace.layout import PlaceLayout
from neuron.weight_trace.sequences import Order
from neuron.weight_trace.sources import Sources, role

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One way to hand tensors over.

    Args:
        mistake: What is wrong with the conversion where it helps.
        tensors: The kinds that are concerned.
        text: That mistake in words.
        change: Gives the tensors that differ, from the layer's own; each is made when it is asked for.
    """

    mistake: WeightMistake
    tensors: tuple[str, ...]
    text: str
    change: Callable[[Tensors], Tensors]


def find_exchanges(layouts: Sequence[PlaceLayout], sources: Sources, spec: ModelSpec) -> list[Exchange]:
    """The exchanges worth trying: of tensors of equal shape, and of what the layouts show."""
    return [
        *_swaps(sources),
        *_transposes(layouts, sources),
        *_expert_orders(layouts, spec),
        *_row_orders(layouts, sources),
        *_rotary_orders(sources, spec),
        *_scales(layouts, sources),
    ]


def _swaps(sources: Sources) -> list[Exchange]:
    pairs = (
        ("w1", "w3"), ("k_proj", "v_proj"), ("q_norm", "k_norm"), ("q_proj", "k_proj"),
        ("input_layernorm", "post_attention_layernorm"),
    )  # fmt: skip
    shapes = {source.kind: source.shape for source in sources.all}
    return [
        Exchange(
            mistake=WeightMistake.SWAPPED,
            tensors=pair,
            text=f"{role(pair[0])} and {role(pair[1])} are swapped",
            change=_swap(sources, *pair),
        )
        for pair in pairs
        if shapes[pair[0]] == shapes[pair[1]]
    ]


def _swap(sources: Sources, one: str, other: str) -> Callable[[Tensors], Tensors]:
    names = _names(sources, one), _names(sources, other)
    pairs = dict(zip(names[0] + names[1], names[1] + names[0], strict=True))
    return lambda tensors: OnAccess(
        {name: partial(tensors.__getitem__, partner) for name, partner in pairs.items()}
    )


def _transposes(layouts: Sequence[PlaceLayout], sources: Sources) -> list[Exchange]:
    """A matrix reshaped where it should be transposed, and one as wide as high, whose shape tells nothing."""
    torn = {kind for layout in layouts for piece in layout.pieces if piece.is_reshaped for kind in piece.torn}
    shapes = {source.kind: source.shape for source in sources.all if len(source.shape) == 2}
    found = []
    for kind, shape in shapes.items():
        if kind not in torn and shape[0] != shape[1]:
            continue
        for change in (_reshaped_transpose, _transposed_reshape):
            found.append(
                Exchange(
                    mistake=WeightMistake.TRANSPOSED,
                    tensors=(kind,),
                    text=f"{role(kind)} is not transposed as the port's forward wants it",
                    change=_each(sources, kind, change),
                )
            )
    return found


def _reshaped_transpose(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T.reshape(tensor.shape)


def _transposed_reshape(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.T.shape).T


def _expert_orders(layouts: Sequence[PlaceLayout], spec: ModelSpec) -> list[Exchange]:
    found: dict[str, tuple[list[int], set[str]]] = {}
    for layout in layouts:
        if layout.experts:
            key = "".join(letter for letter in layout.origin.name if not letter.isdigit())
            experts, kinds = found.setdefault(key, ([], set()))
            experts.extend(layout.experts)
            kinds |= {piece.source.kind for piece in layout.pieces if piece.source is not None}
    orders: dict[tuple[int, ...], set[str]] = {}
    for experts, kinds in found.values():
        if sorted(experts) == list(range(spec.num_local_experts)) != experts:
            orders.setdefault(tuple(experts), set()).update(kinds)
    return [
        Exchange(
            mistake=WeightMistake.ORDER,
            tensors=tuple(sorted(kinds)),
            text=f"{', '.join(role(kind) for kind in sorted(kinds))} of the experts lie in the order "
            f"{', '.join(map(str, order[:6]))}, …",
            change=_reorder_experts(order, sorted(kinds)),
        )
        for order, kinds in orders.items()
    ]


def _reorder_experts(experts: tuple[int, ...], matrices: Sequence[str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: OnAccess(
        {
            expert_weight(found, matrix): partial(tensors.__getitem__, expert_weight(wanted, matrix))
            for wanted, found in enumerate(experts)
            for matrix in matrices
        }
    )


def _row_orders(layouts: Sequence[PlaceLayout], sources: Sources) -> list[Exchange]:
    orders: dict[str, torch.Tensor] = {}
    for layout in layouts:
        for piece in layout.pieces:
            if piece.source is None or piece.rows is None or piece.rows.order is Order.FORWARD:
                continue
            rows = piece.rows.indices
            if len(rows) == piece.source.shape[0] == len(rows.unique()):
                orders.setdefault(piece.source.kind, rows)
    exchanges = [
        Exchange(
            mistake=WeightMistake.ORDER,
            tensors=(kind,),
            text=f"rows of {role(kind)} lie in another order",
            change=_each(sources, kind, partial(_put_back, rows=rows)),
        )
        for kind, rows in orders.items()
    ]
    return exchanges


def _rotary_orders(sources: Sources, spec: ModelSpec) -> list[Exchange]:
    """Rows of q and k in pairs where the forward pairs halves, or the other way round."""
    half = spec.rotary_dim // 2
    still = torch.arange(spec.rotary_dim, spec.head_dim)
    pairs = torch.cat((torch.arange(spec.rotary_dim).reshape(2, half).T.flatten(), still))
    halves = pairs.argsort()
    found = []
    for order, text in ((pairs, "halves"), (halves, "pairs")):
        for kinds in (("q_proj", "k_proj", "q_norm", "k_norm"), ("q_proj", "q_norm"), ("k_proj", "k_norm")):
            changes = [_each(sources, kind, partial(_reorder_heads, order=order)) for kind in kinds]
            found.append(
                Exchange(
                    mistake=WeightMistake.ORDER,
                    tensors=kinds,
                    text=f"rotated rows of {', '.join(kinds)} lie in {text}, and the forward takes them for the other",
                    change=_all(changes),
                )
            )
    return found


def _scales(layouts: Sequence[PlaceLayout], sources: Sources) -> list[Exchange]:
    found = []
    for layout in layouts:
        origin = layout.origin
        kinds = {piece.source.kind for piece in layout.pieces if piece.source is not None}
        if origin.gain in (None, 0, 1) and origin.offset in (None, 0):
            continue
        gain, offset = origin.gain or 1.0, origin.offset or 0.0
        for kind in kinds:
            added = f", and {offset:g} added" if offset else ""
            found.append(
                Exchange(
                    mistake=WeightMistake.SCALED,
                    tensors=(kind,),
                    text=f"{role(kind)} is multiplied by {gain:.4g}{added}",
                    change=_each(sources, kind, partial(_unscale, gain=gain, offset=offset)),
                )
            )
    return list({exchange.text: exchange for exchange in found}.values())


def _put_back(tensor: torch.Tensor, *, rows: torch.Tensor) -> torch.Tensor:
    return tensor[rows.argsort()]


def _reorder_heads(tensor: torch.Tensor, *, order: torch.Tensor) -> torch.Tensor:
    """Rows of every head in another order; `order` has one head's."""
    reordered: torch.Tensor = tensor.unflatten(0, (-1, len(order)))[:, order]
    flat: torch.Tensor = reordered.flatten(0, 1)
    return flat


def _unscale(tensor: torch.Tensor, *, gain: float, offset: float) -> torch.Tensor:
    return (tensor - offset) / gain


def _each(
    sources: Sources, kind: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Tensors], Tensors]:
    names = _names(sources, kind)
    return lambda tensors: OnAccess({name: partial(_changed, tensors, name, change) for name in names})


def _changed(tensors: Tensors, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return change(tensors[name])


def _all(changes: Sequence[Callable[[Tensors], Tensors]]) -> Callable[[Tensors], Tensors]:
    def changed(tensors: Tensors) -> Tensors:
        parts = [change(tensors) for change in changes]
        return OnAccess({name: partial(part.__getitem__, name) for part in parts for name in part})

    return changed


def _names(sources: Sources, kind: str) -> list[str]:
    return [source.name for source in sources.all if source.kind == kind]


class OnAccess(Mapping[str, torch.Tensor]):
    """Tensors that are made anew at every access.

    Args:
        makers: What makes each, by name.
    """

    def __init__(self, makers: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor of one's own; KeyError where there is none of the name."""
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
