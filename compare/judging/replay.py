"""Replay: the golden computed with the port's own choice of experts, to judge tokens past a flip.

At a flip the port chose other experts than the golden, so the output of the port's experts is computed from the
golden's own input to its experts: exactly (its twin), as a golden rounds, and with random roundings (a variant).
T real tokens, t of them replayed, H hidden, E experts, k experts per token, F channels of a site.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from compare.judging.routing import flipped_tokens
from compare.noise.rows import TINY, Rows, Squares, square_difference
from compare.sides.golden_weights import GoldenWeights
from compare.sides.layer_floor import LayerFloor
from compare.sides.sides import Sides
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS
from minimax_tools.reference.float32_stages import expert_shares
from minimax_tools.reference.rounding import Rounding, RoundingKind
from minimax_tools.reference.upcast import ExpertRounding, upcast_experts

# Sites that need the experts' weights; router weights follow from the logits alone.
_BEHIND_EXPERTS = (Site.MOE_DELTA, Site.OUTPUT)


class Replay:
    """The golden with the port's experts, in one layer.

    `experts` are the golden's and the port's, [T,k] each; `flipped` are the tokens for which they differ, bool [T].
    """

    def __init__(self, sides: Sides, *, layer: int, experts: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._sides = sides
        self._layer = layer
        self._exact = partial(sides.read_exact, layer)
        self._golden = partial(sides.read_golden, layer)
        self._port_experts = experts[1].long()
        self.flipped = flipped_tokens(*experts)
        self._exact_logits = self._exact(Site.ROUTER_LOGITS)
        self._replayable = self.flipped & self._are_experts()
        self._experts: _Values | None = None  # what the port's experts add, [t,H], once it is computed

    @property
    def scores(self) -> torch.Tensor | None:
        """Biased scores of the golden, to tell how close a flip was: float32 [T,E]; None without flips or weights."""
        if self._exact_logits is None or self._sides.weights is None or not bool(self.flipped.any()):
            return None
        # The bias alone is read here: what the experts add is computed where a site behind them is judged.
        with self._sides.weights.open_layer(self._layer, self._sides.reference) as weights:
            bias = weights.tensors[CORRECTION_BIAS].float()
        return self._exact_logits.sigmoid() + bias

    def tokens(self, site: Site) -> torch.Tensor:
        """Find tokens past a flip that can be replayed at a site behind the router: bool [T]."""
        # Whether the values that the replay is computed from are known.
        is_known = True
        if site in _BEHIND_EXPERTS:
            held = self._sides.reference.sites(self._layer)
            is_known = self._sides.weights is not None and Site.POST_NORM in held
        if site is Site.OUTPUT:
            is_known = is_known and self._sides.holds_stream(self._layer)
        return self._replayable if is_known else torch.zeros_like(self._replayable)

    def rows(self, site: Site, rows: Rows) -> Rows:
        """Replace in a site's `rows` the golden's values and floor of replayed tokens by what the port's experts give.

        The site is behind the experts, or the router's weights, which are in ascending order of their experts.
        """
        tokens = self.tokens(site)
        if not bool(tokens.any()):
            return rows
        if site is Site.ROUTER_WEIGHTS:
            return self._replay_weights(rows, tokens)
        assert self._sides.weights is not None, "tokens are replayed where the weights are known"
        if self._experts is None:
            # The weights are read once.
            with self._sides.weights.open_layer(self._layer, self._sides.reference) as weights:
                self._experts = self._compute_experts(weights)
        values = self._behind(site, self._experts, tokens, rows)
        # A golden in float32 rounds nothing.
        exact, golden = values.exact, values.exact if rows.dtype is torch.float32 else values.golden
        floor = square_difference(exact, golden, massive=rows.massive)
        widened_floor = floor.maximum(square_difference(exact, values.variant, massive=rows.massive))
        return _put_values(rows, tokens, exact, golden, floor=floor, widened_floor=widened_floor)

    def _replay_weights(self, rows: Rows, tokens: torch.Tensor) -> Rows:
        """Replay the router's weights, which the golden's logits give for any choice."""
        exact = self._shares(self._exact_logits, tokens)
        golden = self._shares(self._golden(Site.ROUTER_LOGITS), tokens)
        floor = square_difference(exact, golden, massive=rows.massive)
        widened_floor = None
        if rows.widened_floor is not None:
            # What a variant's weights would be is not stored: their error is taken to grow as that of its logits.
            widened_floor = floor.times(self._logit_growth()[tokens])
        return _put_values(rows, tokens, exact, golden, floor=floor, widened_floor=widened_floor)

    def _logit_growth(self) -> torch.Tensor:
        """Return the squared error of variants' logits over the golden's: float64 [T], at least 1."""
        floor = LayerFloor(self._sides.reference, self._sides.batch, layer=self._layer)
        golden_squares, widened = floor.squares(Site.ROUTER_LOGITS), floor.widened_squares(Site.ROUTER_LOGITS)
        if golden_squares is None or widened is None:
            return torch.ones(len(self.flipped), dtype=torch.float64)
        return (widened.whole / golden_squares.whole.clamp(min=TINY)).clamp(min=1.0)

    def _behind(self, site: Site, experts: _Values, tokens: torch.Tensor, rows: Rows) -> _Values:
        """Return the values of a site behind the experts, from what the experts add; the output adds the stream."""
        if site is Site.MOE_DELTA:
            return experts
        exact, golden = (
            self._sides.read_stream(self._layer, is_exact=is_exact) for is_exact in (True, False)
        )
        assert exact is not None, "the output is replayed where the residual stream is known"
        assert golden is not None, "the output is replayed where the residual stream is known"
        golden_sum, variant_sum = (
            (golden[tokens] + added).to(rows.dtype).float() for added in (experts.golden, experts.variant)
        )
        return _Values(exact[tokens] + experts.exact, golden_sum, variant_sum)

    def _are_experts(self) -> torch.Tensor:
        """Find tokens for which the port names experts that exist: bool [T]."""
        if self._exact_logits is None:
            return torch.zeros_like(self.flipped)
        return ((self._port_experts >= 0) & (self._port_experts < self._exact_logits.shape[-1])).all(dim=-1)

    def _shares(self, logits: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """Return the shares of the port's experts by the golden's logits, [t,k], experts in ascending order."""
        assert logits is not None, "tokens are replayed where the logits are known"
        return expert_shares(logits[tokens].sigmoid(), self._port_experts[tokens].sort(dim=-1).values)

    def _compute_experts(self, weights: GoldenWeights) -> _Values:
        """Compute what the port's experts add."""
        tokens, states, logits = self._replayable, self._exact(Site.POST_NORM), self._exact_logits
        golden, golden_logits = self._golden(Site.POST_NORM), self._golden(Site.ROUTER_LOGITS)
        assert states is not None, "tokens are replayed where the experts' input is known"
        assert logits is not None, "tokens are replayed where the logits are known"
        assert golden is not None, "a twin is of a golden's own values"
        assert golden_logits is not None, "a twin is of a golden's own values"
        experts = self._port_experts[tokens]
        shares = [
            expert_shares(side[tokens].sigmoid(), experts) for side in (logits, golden_logits, golden_logits)
        ]
        kinds = torch.tensor([RoundingKind.EXACT, RoundingKind.NEAREST, RoundingKind.RANDOM])
        # One call for the three ways, so that each expert is read and upcast once.
        outputs = upcast_experts(
            weights.tensors,
            torch.cat((states[tokens], golden[tokens], golden[tokens])),
            experts.repeat(len(kinds), 1),
            torch.cat(shares),
            rounding=ExpertRounding(
                rounding=Rounding(seed=self._layer), kinds=kinds.repeat_interleave(len(experts))
            ),
        )
        return _Values(*outputs.chunk(len(kinds)))


class _Values(NamedTuple):
    """Replayed values in three ways, float32 [t,F] each."""

    exact: torch.Tensor
    golden: torch.Tensor
    variant: torch.Tensor


def _put_values(
    rows: Rows,
    tokens: torch.Tensor,
    exact: torch.Tensor,
    golden: torch.Tensor,
    *,
    floor: Squares,
    widened_floor: Squares | None,
) -> Rows:
    """Put replayed values [t,F] and their floor in the place of the golden's, as far as the golden kept such."""
    changes: dict[str, Any] = {"reference": _put(rows.reference, tokens, golden), "errors": None}
    if rows.twin is not None:
        changes["twin"] = _put(rows.twin, tokens, exact)
    if rows.floor is not None:
        changes["floor"] = rows.floor.put(tokens, floor)
    if rows.widened_floor is not None and widened_floor is not None:
        changes["widened_floor"] = rows.widened_floor.put(tokens, widened_floor)
    return replace(rows, **changes)


def _put(rows: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a copy of rows [T,F] with values [t,F] at the tokens, bool [T]."""
    changed = rows.clone()
    changed[tokens] = values.to(rows.dtype)
    return changed
