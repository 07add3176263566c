"""Refeed: what the golden's layer makes of the port's own values, so that a site behind a wrong one is judged alone.

A site that fails behind a failing one may be right, and repeat the error that it was handed. mm2's own layer, in
float32, computes it from what the port itself computed it from; the golden's rounding error is added to that, and what
the port still differs by is the site's own. Values that are larger than the golden's are rounded the more coarsely.
T real tokens, E experts, k experts per token, F channels of a site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from compare.noise import Rows
from compare.routing import RouterNoise
from compare.sides import Sides
from compare.weights import GoldenWeights
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.names import CORRECTION_BIAS
from minimax_tools.floor import token_rows
from minimax_tools.inputs import Inputs
from minimax_tools.reference.own_layer import OwnLayer
from minimax_tools.sites import SITE_INPUTS, Site

# Experts are read for so many tokens and no more: those of a layer of true size take seconds then.
_MOST_EXPERT_TOKENS = 256
_TINY = 1e-30

_Values = Mapping[Site, torch.Tensor]


class Refeed:
    """One layer of the golden, fed the port's values.

    Args:
        sides: The captures; the golden is mm2's own.
        golden: The golden.
        layer: The layer.
        weights: Its weights.
    """

    def __init__(self, sides: Sides, golden: Capture, *, layer: int, weights: GoldenWeights) -> None:
        self._sides = sides
        self._layer = layer
        self._weights = weights
        self._own = OwnLayer(weights.spec, weights.tensors)
        inputs = golden.read_inputs()
        self._position_ids = sides.batch.tokens(inputs.position_ids)
        self._row_of = sides.batch.tokens(torch.arange(inputs.batch_size)[:, None].expand(inputs.batch_shape))

    def rows(self, site: Site, rows: Rows) -> Rows | None:
        """Rows of a site whose golden, and twin, are computed from the port's own values.

        Args:
            site: Any whose values are judged.
            rows: As both sides stored them; they have a floor.

        Returns:
            All of them, of experts some; None where a side lacks what the site is computed from, or it is no number.
        """
        fed = self._read_fed(site)
        if fed is None:
            return None
        tokens = torch.ones(rows.num_tokens, dtype=torch.bool)
        if site is Site.MOE_DELTA:
            tokens = _spread_evenly(rows.num_tokens, _MOST_EXPERT_TOKENS)
            fed, rows = fed.select(tokens), rows.select(tokens)
        computed = self._compute(site, fed.theirs, tokens)
        if not bool(computed.isfinite().all()):
            return None
        before = self._compute(site, fed.mine, tokens) if rows.twin is None else rows.twin.float()
        growth = torch.maximum(_growth(before, computed), fed.growth(site))[:, None]
        squared = growth[:, 0].double().square()
        return replace(
            rows,
            reference=computed + growth * (rows.reference.float() - before),
            twin=None if rows.twin is None else computed,
            floor=None if rows.floor is None else rows.floor.times(squared),
            widest=None if rows.widest is None else rows.widest.times(squared),
            # What is left in averages of many tokens is the golden's own, which was computed from other values.
            replayed=torch.ones(rows.num_tokens, dtype=torch.bool),
            stored_dtype=rows.dtype,
        )

    def can_feed(self, site: Site) -> bool:
        """Whether both sides hold what the site is computed from, in one shape and finite."""
        return self._read_fed(site) is not None

    def choice(self, noise: RouterNoise) -> tuple[torch.Tensor, RouterNoise] | None:
        """The experts [T,k] that the port's own logits choose, and how close that choice is.

        Args:
            noise: Of the golden's choice.
        """
        fed = self._read_fed(Site.ROUTER_EXPERTS)
        if fed is None:
            return None
        experts = self._compute(
            Site.ROUTER_EXPERTS, fed.theirs, torch.ones(len(self._row_of), dtype=torch.bool)
        )
        scores = fed.theirs[Site.ROUTER_LOGITS].sigmoid() + self._weights.tensors[CORRECTION_BIAS].float()
        k = experts.shape[-1]
        best = scores.topk(min(k + 1, scores.shape[-1]), dim=-1).values
        return experts, RouterNoise(
            margin=best[:, k - 1] - best[:, -1],
            noise=noise.noise * fed.growth(Site.ROUTER_EXPERTS),
            scores=scores,
        )

    def _read_fed(self, site: Site) -> _Fed | None:
        """What a site is computed from, on both sides, in float32 (experts int64)."""
        mine: dict[Site, torch.Tensor] = {}
        theirs: dict[Site, torch.Tensor] = {}
        for upstream in SITE_INPUTS[site]:
            rows = self._sides.read_rows(self._layer, upstream)
            if rows is None or not self._is_usable(upstream, rows[1]):
                return None
            mine[upstream], theirs[upstream] = (_as_computed(upstream, side, site) for side in rows)
        return _Fed(mine=mine, theirs=theirs)

    def _is_usable(self, site: Site, theirs: torch.Tensor) -> bool:
        """Whether what the port computed can be computed with: numbers, and experts that there are."""
        if site is not Site.ROUTER_EXPERTS:
            return bool(theirs.isfinite().all())
        return bool(((theirs >= 0) & (theirs < self._weights.spec.num_local_experts)).all())

    def _compute(self, site: Site, values: _Values, tokens: torch.Tensor) -> torch.Tensor:
        """The site's rows, float32 [t,F], from rows of the `tokens`, bool [T], that it is computed from."""
        if site is not Site.ATTN_CONTEXT:
            return self._compute_prompt(site, values, self._position_ids[tokens])
        prompts = [(self._row_of == row).nonzero()[:, 0] for row in self._row_of.unique().tolist()]
        return torch.cat(
            [
                self._compute_prompt(
                    site,
                    {upstream: value[prompt] for upstream, value in values.items()},
                    self._position_ids[prompt],
                )
                for prompt in prompts
            ]
        )

    def _compute_prompt(self, site: Site, values: _Values, position_ids: torch.Tensor) -> torch.Tensor:
        """The site's rows from those of one prompt without padding; what heeds no other token takes all at once."""
        head_dim = self._weights.spec.head_dim
        shaped = {
            upstream: value.unflatten(-1, (-1, head_dim)).transpose(0, 1)[None]
            if upstream.has_heads_dim
            else value[None]
            for upstream, value in values.items()
        }
        return token_rows(self._own.compute(site, shaped, _as_one_prompt(position_ids)), site)[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fed:
    """What a site is computed from: rows of both sides, [T,F] each."""

    mine: _Values
    theirs: _Values

    def select(self, tokens: torch.Tensor) -> _Fed:
        """Those of some tokens, bool [T]."""
        return _Fed(
            mine={site: rows[tokens] for site, rows in self.mine.items()},
            theirs={site: rows[tokens] for site, rows in self.theirs.items()},
        )

    def growth(self, site: Site) -> torch.Tensor:
        """How many times as large the port's values are, never below 1: float32 [T]."""
        product = torch.ones(len(next(iter(self.mine.values()))))
        for upstream, mine in self.mine.items():
            if upstream is Site.ROUTER_EXPERTS:
                continue
            growth = _growth(mine, self.theirs[upstream])
            # Every token may attend to the largest key and value.
            product = product * (growth.max() if site is Site.ATTN_CONTEXT else growth)
        return product


def _as_computed(site: Site, rows: torch.Tensor, consumer: Site) -> torch.Tensor:
    """Rows [T,F] of a site as another is computed from them."""
    if site is not Site.ROUTER_EXPERTS:
        return rows.float()
    # The router's weights are judged in the order of their experts.
    return rows.long().sort(dim=-1).values if consumer is Site.ROUTER_WEIGHTS else rows.long()


def _growth(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """How many times as long each row of `now` is, never below 1: float32 [T]."""
    ratio: torch.Tensor = now.norm(dim=-1) / before.norm(dim=-1).clamp(min=_TINY)
    return ratio.clamp(min=1.0)


def _spread_evenly(num_tokens: int, most: int) -> torch.Tensor:
    """Which tokens, bool [T]: all, or as many as `most`, evenly spread."""
    chosen = torch.zeros(num_tokens, dtype=torch.bool)
    chosen[torch.linspace(0, num_tokens - 1, min(num_tokens, most)).round().long()] = True
    return chosen


def _as_one_prompt(position_ids: torch.Tensor) -> Inputs:
    """Inputs [1,T] of tokens at these positions [T], none of them padding."""
    positions = position_ids[None]
    return Inputs(
        input_ids=torch.zeros_like(positions),
        attention_mask=torch.ones_like(positions),
        position_ids=positions,
        source="the port's own values",
    )
