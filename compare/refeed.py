"""Refeed: what a right port computes from the port's own values, so that a site behind a wrong one is judged alone.

A site that fails behind a failing one may be right, and repeat the error that it was handed. mm2's own layer, in
float32, computes it from what the port itself computed it from; what the port still differs by is the site's own.
What BF16 may cost there is what it cost the golden, relative to how large the values are.
T real tokens, t those that are judged, E experts, k experts per token, F channels of a site.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from compare.noise import BFLOAT16_ROUNDING, Rows, foreseen_error
from compare.norms import Squares, square_difference, square_rows
from compare.routing import RouterNoise
from compare.sides import Sides
from compare.weights import GoldenWeights
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.names import CORRECTION_BIAS
from minimax_tools.floor import token_rows
from minimax_tools.inputs import Inputs
from minimax_tools.reference.own_layer import OwnLayer
from minimax_tools.sites import SITE_INPUTS, Site

# Experts are read for so many tokens and no more: those that are furthest off, and others evenly spread.
_MOST_FURTHEST, _MOST_SPREAD = 64, 192
_TINY = 1e-300

_Values = Mapping[Site, torch.Tensor]


class Refeed:
    """One layer of the golden, fed the port's values.

    Args:
        sides: The captures; the golden is mm2's own.
        golden: The golden.
        layer: The layer.
        failing: Its sites that fail: what a port shows there may be a copy of what it computes with.
        open_weights: Gives its weights; called once, when they are needed.
    """

    def __init__(
        self,
        sides: Sides,
        golden: Capture,
        *,
        layer: int,
        failing: frozenset[Site],
        open_weights: Callable[[], GoldenWeights],
    ) -> None:
        self._sides = sides
        self._layer = layer
        self._failing = failing
        self._open_weights = open_weights
        inputs = golden.read_inputs()
        self._position_ids = sides.batch.tokens(inputs.position_ids)
        self._prompt_of = sides.batch.tokens(
            torch.arange(inputs.batch_size)[:, None].expand(inputs.batch_shape)
        )

    @cached_property
    def _weights(self) -> GoldenWeights:
        return self._open_weights()

    @cached_property
    def _own(self) -> OwnLayer:
        return OwnLayer(self._weights.spec, self._weights.tensors)

    def rows(self, site: Site, stored: Rows) -> Iterator[Rows]:
        """Rows of a site whose golden is computed from the port's own values.

        First from all that the port shows. Then, since that may be a copy of what it computes with (scaled, in another
        order), with the golden's in place of some that fail: a stage that is right with any of these is right.

        Args:
            site: Any whose values are judged.
            stored: As both sides stored them; they have a floor.

        Yields:
            Those tokens of which all that the site is computed from is finite; of `moe_delta` some of them. Nothing
            where a side lacks what the site is computed from.
        """
        upstream = self._read_upstream(site)
        if upstream is None:
            return
        tokens = upstream.usable
        if site is Site.MOE_DELTA:
            tokens = tokens & _sample(stored)
        if not bool(tokens.any()):
            return
        selected = stored.select(tokens)
        for values in self._variants(site, upstream):
            computed = self._compute(site, values, tokens)
            floor = _scale_floor(selected, computed)
            if site is Site.ATTN_CONTEXT:
                floor = floor.times(self._score_growth(values, upstream.mine)[tokens].square())
            if bool(computed.isfinite().all() & floor.whole.isfinite().all()):
                yield Rows(
                    reference=computed,
                    target=selected.target,
                    massive=selected.massive,
                    places=selected.places,
                    floor=floor,
                    stored_dtype=selected.dtype,
                )

    def can_feed(self, site: Site) -> bool:
        """Whether both sides hold what the site is computed from, in one shape and finite."""
        upstream = self._read_upstream(site)
        return upstream is not None and bool(upstream.usable.all())

    def choice(self, noise: RouterNoise) -> tuple[torch.Tensor, RouterNoise] | None:
        """The experts [T,k] that the port's own logits choose, and how close that choice is.

        Args:
            noise: Of the golden's choice.
        """
        upstream = self._read_upstream(Site.ROUTER_EXPERTS)
        if upstream is None or not bool(upstream.usable.all()):
            return None
        mine, theirs = (side[Site.ROUTER_LOGITS] for side in (upstream.mine, upstream.theirs))
        experts = self._compute(Site.ROUTER_EXPERTS, upstream.theirs, upstream.usable)
        scores = theirs.sigmoid() + self._weights.tensors[CORRECTION_BIAS].float()
        k = experts.shape[-1]
        best = scores.topk(min(k + 1, scores.shape[-1]), dim=-1).values
        is_whole = k == scores.shape[-1]
        margin = torch.full_like(best[:, 0], torch.inf) if is_whole else best[:, k - 1] - best[:, k]
        growth = (_lengths(theirs) / _lengths(mine)).clamp(min=1.0)
        if not bool(growth.isfinite().all()):
            return None
        return experts, RouterNoise(margin=margin, noise=noise.noise * growth, scores=scores)

    def _read_upstream(self, site: Site) -> _Upstream | None:
        mine: dict[Site, torch.Tensor] = {}
        theirs: dict[Site, torch.Tensor] = {}
        usable = torch.ones_like(self._prompt_of, dtype=torch.bool)
        for upstream in SITE_INPUTS[site]:
            rows = self._sides.read_rows(self._layer, upstream)
            if rows is None:
                return None
            mine[upstream], theirs[upstream] = (_as_computed(upstream, side, site) for side in rows)
            usable &= self._are_usable(upstream, theirs[upstream])
        if site is Site.ATTN_CONTEXT:
            # Tokens attend to others of their prompt.
            broken = self._prompt_of[~usable].unique()
            usable = ~torch.isin(self._prompt_of, broken)
        return _Upstream(mine=mine, theirs=theirs, usable=usable)

    def _are_usable(self, site: Site, rows: torch.Tensor) -> torch.Tensor:
        """Which tokens can be computed with, bool [T]: numbers, and experts that there are."""
        if site is not Site.ROUTER_EXPERTS:
            return rows.isfinite().all(dim=-1)
        return ((rows >= 0) & (rows < self._weights.spec.num_local_experts)).all(dim=-1)

    def _variants(self, site: Site, upstream: _Upstream) -> Iterator[_Values]:
        """What the site may have been computed from, each time at least one value of the port's."""
        groups = [[one] for one in SITE_INPUTS[site]]
        if site is Site.MOE_DELTA:
            # A choice and its weights go together.
            groups = [[Site.POST_NORM], [Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS]]
        choices = [list(self._alternatives(group, upstream)) for group in groups]
        for chosen in itertools.product(*choices):
            values = {name: rows for part in chosen for name, rows in part.items()}
            if any(values[name] is not upstream.mine[name] for name in values):
                yield values

    def _alternatives(self, group: list[Site], upstream: _Upstream) -> Iterator[_Values]:
        yield {site: upstream.theirs[site] for site in group}
        if self._failing & set(group):
            if Site.ROUTER_WEIGHTS in group:
                yield from self._weigh_again(upstream)
            yield {site: upstream.mine[site] for site in group}

    def _weigh_again(self, upstream: _Upstream) -> Iterator[_Values]:
        """The port's experts with what its own logits give each of them, whatever order it shows their weights in."""
        router = self._read_upstream(Site.ROUTER_WEIGHTS)
        if router is not None and bool(router.usable.all()):
            experts = upstream.theirs[Site.ROUTER_EXPERTS]
            values = {**router.theirs, Site.ROUTER_EXPERTS: experts}
            yield {
                Site.ROUTER_EXPERTS: experts,
                Site.ROUTER_WEIGHTS: self._compute(Site.ROUTER_WEIGHTS, values, router.usable),
            }

    def _compute(self, site: Site, values: _Values, tokens: torch.Tensor) -> torch.Tensor:
        """The site's rows, [t,F] float32 (experts int64), of the `tokens`, bool [T]."""
        if site is not Site.ATTN_CONTEXT:
            return self._compute_prompt(site, values, tokens)
        prompts = self._prompt_of[tokens].unique().tolist()
        return torch.cat(
            [self._compute_prompt(site, values, self._prompt_of == prompt) for prompt in prompts]
        )

    def _compute_prompt(self, site: Site, values: _Values, tokens: torch.Tensor) -> torch.Tensor:
        """The same as if the tokens were one prompt without padding; what heeds no other token takes all at once."""
        head_dim = self._weights.spec.head_dim
        shaped = {
            upstream: rows[tokens].unflatten(-1, (-1, head_dim)).transpose(0, 1)[None]
            if upstream.has_heads_dim
            else rows[tokens][None]
            for upstream, rows in values.items()
        }
        return token_rows(self._own.compute(site, shaped, _as_one_prompt(self._position_ids[tokens])), site)[
            0
        ]

    def _score_growth(self, values: _Values, mine: _Values) -> torch.Tensor:
        """How many times as large attention's scores may be as the golden's, never below 1: float64 [T].

        They are rounded relative to their size, which then counts in full.
        """
        queries = _lengths(values[Site.Q_ROPE]) / _lengths(mine[Site.Q_ROPE])
        growth = torch.ones_like(queries)
        for prompt in self._prompt_of.unique().tolist():
            tokens = self._prompt_of == prompt
            longest = [_lengths(side[Site.K_ROPE][tokens]).cummax(dim=0).values for side in (values, mine)]
            growth[tokens] = (queries[tokens] * longest[0] / longest[1]).clamp(min=1.0)
        return growth


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Upstream:
    """What a site is computed from.

    Args:
        mine: The golden's rows, [T,F] each.
        theirs: The port's.
        usable: Which tokens can be computed from the port's, bool [T].
    """

    mine: _Values
    theirs: _Values
    usable: torch.Tensor


def _as_computed(site: Site, rows: torch.Tensor, consumer: Site) -> torch.Tensor:
    """Rows [T,F] of a site as another is computed from them."""
    if site is not Site.ROUTER_EXPERTS:
        return rows.float()
    # The router's weights are judged in the order of their experts.
    return rows.long().sort(dim=-1).values if consumer is Site.ROUTER_WEIGHTS else rows.long()


def _scale_floor(stored: Rows, computed: torch.Tensor) -> Squares:
    """What BF16 may cost at values as large as those computed, [t,F]: squares per token."""
    base = foreseen_error(stored)
    before, after = (square_rows(rows, massive=stored.massive) for rows in (stored.reference, computed))
    is_rounded = stored.dtype != torch.float32
    return Squares(
        ordinary=_scale(base.ordinary, before.ordinary, after.ordinary, is_rounded=is_rounded),
        massive=_scale(base.massive, before.massive, after.massive, is_rounded=is_rounded),
    )


def _scale(
    base: torch.Tensor, before: torch.Tensor, after: torch.Tensor, *, is_rounded: bool
) -> torch.Tensor:
    """The golden's squared error, of values of the squared norms `before`, for such of `after`: float64 [t] each.

    Relative to the values it is the median token's, since a sum that cancels in one is nothing to go by in another; and
    at least the token's own, smaller as all values are. It is never less than one rounding of what was computed.
    """
    growth = after / before.clamp(min=_TINY)
    usual = (base / before.clamp(min=_TINY)).median()
    floor = torch.maximum(usual * after, growth.median().clamp(max=1.0) * base)
    return torch.maximum(floor, BFLOAT16_ROUNDING**2 * after) if is_rounded else floor


def _sample(stored: Rows) -> torch.Tensor:
    """Which tokens the experts are run for, bool [T]: those furthest from the golden, and others evenly spread."""
    num_tokens = stored.num_tokens
    chosen = torch.zeros(num_tokens, dtype=torch.bool)
    chosen[torch.linspace(0, num_tokens - 1, min(num_tokens, _MOST_SPREAD)).round().long()] = True
    error = square_difference(stored.reference, stored.target, massive=stored.massive).whole
    chosen[error.nan_to_num(nan=torch.inf).topk(min(num_tokens, _MOST_FURTHEST)).indices] = True
    return chosen


def _lengths(rows: torch.Tensor) -> torch.Tensor:
    """Norms of rows [T,F], float64 [T], above 0."""
    lengths: torch.Tensor = rows.double().norm(dim=-1)
    return lengths.clamp(min=_TINY)


def _as_one_prompt(position_ids: torch.Tensor) -> Inputs:
    """Inputs [1,t] of tokens at these positions [t], none of them padding."""
    positions = position_ids[None]
    return Inputs(
        input_ids=torch.zeros_like(positions),
        attention_mask=torch.ones_like(positions),
        position_ids=positions,
        source="the port's own values",
    )
