"""Mistakes of which token's values stand where: rows that are rearranged, and ranks that add parts of other tokens.

B prompts, S tokens of each, T judged tokens, F channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch

from compare.catalogue.candidates import Parameters, share
from compare.catalogue.clues import Clues
from compare.catalogue.experts import is_on_rank, width_of_rank
from compare.catalogue.mistake import Mistake
from minimax_tools.model import weight_names
from minimax_tools.model.graph import LayerGraph
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.evaluation import Change, Evaluation, ExpertValue, LayerInputs, replace_stage
from minimax_tools.reference.expert_pass import ExpertJob, Recipe, run_experts
from minimax_tools.reference.float32_stages import has_all_tokens

# From a call's numbers of rows and of tokens in each to the token of the call whose values each one gets.
_Within = Callable[[int, int], torch.Tensor]

_RANKS = (2, 3, 4, 6, 8, 16)
# What is divided among the ranks: the tokens of all rows of a call, or those of each row.
_ALONG = ("all rows", "each row")
_MOST_TOLD = 3


def _grid(num_rows: int, length: int) -> torch.Tensor:
    return torch.arange(num_rows * length).view(num_rows, length)


# Ways in which rows of a call are rearranged.
_ORDERS: Mapping[str, _Within] = MappingProxyType(
    {
        "[S,B] read as [B,S]": lambda rows, length: _grid(rows, length).T.flatten(),
        "[B,S] read as [S,B]": lambda rows, length: _grid(length, rows).T.flatten(),
        "rows reversed": lambda rows, length: _grid(rows, length).flip(0).flatten(),
        "rows one on": lambda rows, length: _grid(rows, length).roll(-1, 0).flatten(),
        "rows one back": lambda rows, length: _grid(rows, length).roll(1, 0).flatten(),
    }
)


def _sites(graph: LayerGraph) -> tuple[Site, ...]:
    """Return the sites whose tokens may be rearranged, the last one first."""
    return (graph.last_delta, Site.ATTN_DELTA, Site.ATTN_CONTEXT, Site.POST_NORM)


def _rearrange(site: str, order: str = "", tokens: str = "") -> Change:
    """Give tokens the values of others at a site: in one of `_ORDERS`, or token by token."""
    node = Site(site)

    def stage(layer: Evaluation) -> torch.Tensor:
        everywhere = layer.base.everywhere()
        right, sources = everywhere[node], _sources(everywhere.inputs, order, tokens)
        if has_all_tokens(node):
            return layer.inputs.held(right.flatten(0, 1)[sources].view(right.shape))
        return right[sources[layer.places]]

    return replace_stage(node, stage)


def _sources(inputs: LayerInputs, order: str, tokens: str) -> torch.Tensor:
    """Return the token whose values each of the B·S tokens gets, int64 [B·S]."""
    if order:
        return inputs.sources(_ORDERS[order])
    sources, length = torch.arange(inputs.attention_mask.numel()), inputs.attention_mask.shape[1]
    for pair in tokens.split():
        place, source = (_parse_token(token, length) for token in pair.split("<"))
        sources[place] = source
    return sources


def _parse_token(text: str, length: int) -> int:
    row, token = text.split(".")
    return int(row) * length + int(token)


def _orders(inputs: LayerInputs) -> tuple[Parameters, ...]:
    every, is_real = torch.arange(inputs.attention_mask.numel()), inputs.attention_mask.flatten().bool()
    moving = [order for order in _ORDERS if bool(((inputs.sources(_ORDERS[order]) != every) & is_real).any())]
    sites = (Site.INPUT_NORM, *sorted(_sites(inputs.graph), key=lambda site: site.order))
    return tuple({"site": str(site), "order": order} for site in sites for order in moving)


def _find_moved(clues: Clues) -> tuple[Parameters, ...]:
    return tuple(
        {"site": str(site), **_word_moved(clues.base.inputs, moved)}
        for site in _sites(clues.base.graph)
        if (moved := clues.moved_tokens(site))
    )


def _word_moved(inputs: LayerInputs, moved: Mapping[int, int]) -> Parameters:
    """Word the tokens that hold others' values: one of `_ORDERS`, or token by token."""
    for order, within in _ORDERS.items():
        sources = inputs.sources(within)
        if all(int(sources[token]) == source for token, source in moved.items()):
            return {"order": order}
    length = inputs.attention_mask.shape[1]
    pairs = [[f"{token // length}.{token % length}" for token in pair] for pair in sorted(moved.items())]
    return {"tokens": " ".join(map("<".join, pairs))}


def _tell_tokens(_: ModelSpec, parameters: Parameters) -> str:
    pairs = [pair.split("<") for pair in str(parameters.get("tokens", "")).split()]
    words = [
        f"row {place.replace('.', ', token ')} holds that of row {source.replace('.', ', token ')}"
        for place, source in pairs[:_MOST_TOLD]
    ]
    more = f"; {len(pairs) - _MOST_TOLD} more" if len(pairs) > _MOST_TOLD else ""
    return f"Of {parameters['site']}, {'; '.join(words)}{more}." if pairs else ""


def _add_parts(site: str, ranks: int, parts: str, along: str) -> Change:
    """Add the ranks' parts of a site, each of a token of its own share of the tokens."""
    part_of = {"heads": _heads_of, "width": _width_of, "experts": _experts_of}[parts]

    def stage(layer: Evaluation) -> torch.Tensor:
        everywhere = layer.base.everywhere()
        total = torch.zeros(len(layer.tokens), layer.spec.hidden_size)
        for rank in range(ranks):
            within = partial(_token_of_rank, ranks=ranks, rank=rank, along=along)
            sources = everywhere.inputs.sources(within)[layer.places]
            held, places = sources[sources >= 0].unique(return_inverse=True)
            total[sources >= 0] += part_of(everywhere, held, ranks, rank)[places]
        return total

    return replace_stage(Site.ATTN_DELTA if parts == "heads" else ExpertValue.ROUTED_SUM, stage)


def _token_of_rank(num_rows: int, length: int, *, ranks: int, rank: int, along: str) -> torch.Tensor:
    """Return the token that a rank computes where it should compute each token of a call; -1 where it has none."""
    size = length if along == _ALONG[1] else num_rows * length
    places = torch.arange(num_rows * length)
    share_size = -(-size // ranks)
    token = rank * share_size + places % size % share_size
    return torch.where(token < size, places // size * size + token, -1)


def _heads_of(layer: Evaluation, tokens: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    part = share(layer.spec.query_width, ranks, rank)
    return layer[Site.ATTN_CONTEXT][tokens][:, part] @ layer.weight(weight_names.O_PROJ)[:, part].T


def _width_of(layer: Evaluation, tokens: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    experts = layer[Site.ROUTER_EXPERTS][tokens]
    return _sum_experts(layer, tokens, experts, Recipe(mix=width_of_rank(ranks, rank)))


def _experts_of(layer: Evaluation, tokens: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    experts = torch.where(is_on_rank(layer, ranks, rank), layer[Site.ROUTER_EXPERTS], -1)
    return _sum_experts(layer, tokens, experts[tokens], Recipe())


def _sum_experts(
    layer: Evaluation, tokens: torch.Tensor, experts: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    shares = layer[Site.ROUTER_WEIGHTS][tokens]
    states = layer[ExpertValue.EXPERT_INPUT][tokens]
    job = ExpertJob(graph=layer.spec.graph, states=states, experts=experts, shares=shares, recipe=recipe)
    return (run_experts(layer.weights, [job])[0] * shares[..., None]).sum(1)


def _find_sums(clues: Clues) -> tuple[Parameters, ...]:
    """Find the numbers of ranks whose shares of the tokens hold the same values."""
    graph = clues.base.graph
    divided = {
        Site.ATTN_DELTA: ("heads",),
        **({} if graph.is_dense else {graph.routed_sum: ("width", "experts")}),
    }
    return tuple(
        {"site": str(site), "ranks": ranks, "parts": part, "along": along}
        for site, parts in divided.items()
        for along in _ALONG
        for ranks in _RANKS
        if _repeats(clues, site, ranks=ranks, along=along)
        for part in parts
    )


def _repeats(clues: Clues, site: Site, *, ranks: int, along: str) -> bool:
    """Decide whether the first rank's share of the tokens repeats: then so do all others."""
    within = partial(_token_of_rank, ranks=ranks, rank=0, along=along)
    return clues.repeats(site, clues.base.inputs.sources(within))


TOKEN_MISTAKES = (
    Mistake(
        name="tokens_rearranged",
        detail=_tell_tokens,
        build=_rearrange,
        candidates=_orders,
        find=_find_moved,
        reads_right_layer=True,
    ),
    Mistake(
        name="ranks_add_other_tokens",
        build=_add_parts,
        # Of attention in a black box, nothing tells the ranks.
        candidates=lambda inputs: tuple(
            {"site": "attn_delta", "ranks": ranks, "parts": "heads", "along": along}
            for ranks in (2, 4, 8)
            for along in _ALONG
            if inputs.spec.num_attention_heads % ranks == 0
        ),
        find=_find_sums,
        reads_right_layer=True,
    ),
)
