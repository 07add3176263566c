"""The port's own choice of experts: derived where it does not show it, and the golden computed with it.

DerivedChoice: the experts that a port must have chosen, from what it shows of its router or of its experts' output.
If it shows its choice too, the two must agree. Where BF16 noise may turn two scores round, a right port may have chosen
either expert: the output of every choice within reach of noise is computed, and the port judged by the nearest. A token
with too many choices stays open, and so do tokens beyond a number of them: a wrong port shows in the others.

Replay: at a flip the port chose other experts than the golden, so the output of the port's experts is computed from the
golden's own input to its experts: exactly (its twin), as a golden rounds, and with random roundings (a variant).
T real tokens, t of them judged or replayed, c choices of one token, E experts, k per token, H hidden, F channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from compare.judging.routing import RouterNoise, flipped_tokens
from compare.noise.rho import token_ratios
from compare.noise.rows import TINY, Rows, Squares, square_difference
from compare.sides.golden_weights import GoldenWeights
from compare.sides.layer_floor import LayerFloor
from compare.sides.sides import Sides, spread_evenly
from minimax_tools.metrics.noise_floor import choice_margin
from minimax_tools.model.router import Router, weigh_experts
from minimax_tools.model.sites import BEHIND_EXPERTS, Site
from minimax_tools.model.weight_names import GATE
from minimax_tools.reference.rounding import Rounding, RoundingKind
from minimax_tools.reference.upcast import ExpertRounding, upcast_experts

# Error of float32 logits that are summed in another order, relative to the token's largest logit.
_FLOAT32_ERROR = 1e-5
# Largest rounding error of BF16, relative to the value.
_BFLOAT16_ERROR = 2.0**-8
# A token whose ρ is at most this has the golden's experts.
_PLAINLY_ALIKE = 1.2
# A token with more choices stays open.
_MOST_CHOICES = 24
# Tokens whose choices are computed. A right port has few above the ρ; a wrong one shows in these.
_MOST_TOKENS = 256
# Sites that need the experts' weights; router weights follow from the logits alone.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DerivedChoice:
    """A choice of experts that the port did not show."""

    experts: torch.Tensor  # experts of each token, int64 [T,k]
    is_sure: torch.Tensor  # tokens whose choice is certain, bool [T]; else the port's values are too coarse

    def completed(self, other: DerivedChoice | None) -> DerivedChoice:
        """Return this choice, with the other's for tokens that are not sure here."""
        if other is None:
            return self
        return DerivedChoice(
            experts=self.experts.where(self.is_sure[:, None], other.experts),
            is_sure=self.is_sure | other.is_sure,
        )


def derive_choice(sides: Sides, layer: int) -> DerivedChoice | None:
    """Derive the choice of a layer whose port shows its router's logits or `post_norm`, and not its experts.

    None if the port shows neither, or the weights are not known.
    """
    if sides.weights is None or sides.is_classic:
        return None
    # Rows of both sides, of which the port's, `rows[1]`, are needed.
    shown = {site: sides.read_rows(layer, site) for site in (Site.ROUTER_LOGITS, Site.POST_NORM)}
    usable = {
        site: rows[1].float()
        for site, rows in shown.items()
        if rows is not None and bool(rows[1].isfinite().all())
    }
    if not usable:
        return None
    with sides.weights.open_layer(layer, sides.reference) as weights:
        return _derive(usable, weights)


def find_contradictions(sides: Sides, layer: int, experts: torch.Tensor) -> torch.Tensor | None:
    """Find tokens whose experts [T,k] contradict the port's own logits and the right correction bias: bool [T].

    None if the port does not show its logits, or the bias is not known.
    """
    rows = sides.read_rows(layer, Site.ROUTER_LOGITS)
    if sides.weights is None or rows is None or not bool(rows[1].isfinite().all()):
        return None
    port_logits = rows[1].float()
    with sides.weights.open_layer(layer, sides.reference) as weights:
        derived = _derive({Site.ROUTER_LOGITS: port_logits}, weights)
    return derived.is_sure & flipped_tokens(derived.experts, experts)


def _derive(shown: dict[Site, torch.Tensor], weights: GoldenWeights) -> DerivedChoice:
    """Derive the choice from the logits, else from the router's input; float32 rows [T,F] of either or both."""
    logits, k = shown.get(Site.ROUTER_LOGITS), weights.spec.num_experts_per_tok
    # Logits that are not shown are rounded where the model's router is not in float32: many are equal then.
    is_rounded = not weights.spec.graph.has_float32_router
    if logits is not None:
        is_rounded = torch.equal(logits, logits.bfloat16().float())
    else:
        logits = shown[Site.POST_NORM] @ weights.tensors[GATE].float().T
    sizes = logits.abs()
    error = _BFLOAT16_ERROR * sizes if is_rounded else _FLOAT32_ERROR * sizes.amax(dim=-1, keepdim=True)
    router = Router.of(weights.spec, weights.tensors)
    ranking = router.ranking(logits)
    # Two experts next to the margin may err.
    reach = router.ranking_error(logits, error).amax(dim=-1)
    return DerivedChoice(
        experts=ranking.topk(k, dim=-1).indices, is_sure=choice_margin(ranking, k) > 2.0 * reach
    )


def find_nearest_choice(
    sides: Sides, layer: int, *, site: Site, rows: Rows, noise: RouterNoise
) -> DerivedChoice | None:
    """Find the choice nearest to each token of a port, among those that noise may have made.

    The layer's input is the golden's. The site is behind the experts; its rows, all real tokens of both sides,
    have a floor and are finite. `noise` is the margin and noise of the golden's choice. None if the weights are not
    known, or the golden does not hold its experts' input or, for the output, the residual stream.
    """
    # All are [T,…]. The exact values are the float32 twin's, or the golden's own if it kept no
    # twin. The stream is what the experts' sum is added to.
    golden = sides.read_golden(layer, Site.ROUTER_EXPERTS)
    states, logits = sides.read_exact(layer, Site.POST_NORM), sides.read_exact(layer, Site.ROUTER_LOGITS)
    beside = sides.read_beside(layer, site, is_exact=True)
    if sides.weights is None or golden is None or states is None or logits is None:
        return None
    if beside is None:
        return None
    experts = golden.long()
    reach = noise.reach
    # Noise may have flipped these tokens, and they are not plainly like the golden.
    is_open = noise.is_fragile() & (token_ratios(rows) > _PLAINLY_ALIKE)
    if not bool(is_open.any()):
        return DerivedChoice(experts=experts, is_sure=torch.ones_like(is_open))
    open_tokens = is_open.nonzero()[:, 0]
    with sides.weights.open_layer(layer, sides.reference) as weights:
        router = Router.of(weights.spec, weights.tensors)
        ranking = router.ranking(logits)
        # None for a token with too many choices.
        choices_of = {
            token: _choices_within(ranking[token], experts[token], float(reach[token]))
            for token in open_tokens[spread_evenly(len(open_tokens), _MOST_TOKENS)].tolist()
        }
        choices = {token: listed for token, listed in choices_of.items() if listed is not None}
        is_sure = ~is_open
        is_sure[list(choices)] = True
        if not choices:
            return DerivedChoice(experts=experts, is_sure=is_sure)
        # One candidate for each choice of each token.
        tokens = torch.tensor([token for token, listed in choices.items() for _ in listed])
        candidates = torch.cat(list(choices.values()))
        added = upcast_experts(
            weights.tensors,
            states[tokens],
            candidates,
            weigh_experts(weights.spec.graph, logits[tokens], candidates),
            graph=weights.spec.graph,
        )
    added = beside[tokens] + sides.routed_scale(site) * added
    distance = square_difference(added, rows.target[tokens], massive=rows.massive).whole
    nearest = experts.clone()
    for token in choices:
        of_token = (tokens == token).nonzero()[:, 0]
        nearest[token] = candidates[of_token[distance[of_token].argmin()]]
    return DerivedChoice(experts=nearest, is_sure=is_sure)


def _choices_within(scores: torch.Tensor, chosen: torch.Tensor, reach: float) -> torch.Tensor | None:
    """List the choices that noise may have made from scores [E]: int64 [c,k], `chosen` [k] first.

    Noise may exchange experts if no dropped one is more than `reach` above a new one. None if the choices are too many.
    """
    is_chosen = torch.zeros_like(scores, dtype=torch.bool)
    is_chosen[chosen] = True
    least, most = scores[is_chosen].min(), scores[~is_chosen].max()
    droppable = (is_chosen & (scores <= most + reach)).nonzero()[:, 0].tolist()
    eligible = (~is_chosen & (scores >= least - reach)).nonzero()[:, 0].tolist()
    exchanges = list(itertools.islice(_exchanges(scores, droppable, eligible, reach), _MOST_CHOICES))
    if len(exchanges) == _MOST_CHOICES:
        return None
    choices = [chosen.tolist()]
    for dropped, added in exchanges:
        choices.append([expert for expert in choices[0] if expert not in dropped] + list(added))
    return torch.tensor(choices)


def _exchanges(
    scores: torch.Tensor, droppable: list[int], eligible: list[int], reach: float
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield pairs of dropped and new experts that noise may have exchanged, the fewest first."""
    for count in range(1, min(len(droppable), len(eligible)) + 1):
        for dropped in itertools.combinations(droppable, count):
            highest = max(float(scores[expert]) for expert in dropped)
            within = [expert for expert in eligible if highest - float(scores[expert]) <= reach]
            for added in itertools.combinations(within, count):
                yield dropped, added


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
        self._graph = sides.reference.graph
        self.flipped = flipped_tokens(*experts)
        self._exact_logits = self._exact(Site.ROUTER_LOGITS)
        self._replayable = self.flipped & self._are_experts()
        self._experts: _Values | None = None  # what the port's experts add, [t,H], once it is computed

    @property
    def scores(self) -> torch.Tensor | None:
        """The golden's ranking of experts [T,E], to tell how close a flip was; None without flips or weights."""
        if self._exact_logits is None or self._sides.weights is None or not bool(self.flipped.any()):
            return None
        # The bias alone is read here: what the experts add is computed where a site behind them is judged.
        with self._sides.weights.open_layer(self._layer, self._sides.reference) as weights:
            router = Router.of(weights.spec, weights.tensors)
        return router.ranking(self._exact_logits)

    def tokens(self, site: Site) -> torch.Tensor:
        """Find tokens past a flip that can be replayed at a site behind the router: bool [T]."""
        # Whether the values that the replay is computed from are known.
        is_known = True
        if site in BEHIND_EXPERTS:
            held = self._sides.reference.sites(self._layer)
            is_known = self._sides.weights is not None and Site.POST_NORM in held
            is_known = is_known and self._sides.holds_beside(self._layer, site)
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
        golden = self._shares(self._golden(Site.ROUTER_LOGITS), tokens).to(rows.dtype).float()
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
        """Return the values of a site behind the experts, from what the routed experts add."""
        if site is self._sides.reference.graph.layer(self._layer).routed_sum:
            return experts
        exact, golden = (
            self._sides.read_beside(self._layer, site, is_exact=is_exact) for is_exact in (True, False)
        )
        assert exact is not None, "a site is replayed where all that it adds is known"
        assert golden is not None, "a site is replayed where all that it adds is known"
        scale = self._sides.routed_scale(site)
        golden_sum, variant_sum = (
            (golden[tokens] + scale * added).to(rows.dtype).float()
            for added in (experts.golden, experts.variant)
        )
        return _Values(exact[tokens] + scale * experts.exact, golden_sum, variant_sum)

    def _are_experts(self) -> torch.Tensor:
        """Find tokens for which the port names experts that exist: bool [T]."""
        if self._exact_logits is None:
            return torch.zeros_like(self.flipped)
        return ((self._port_experts >= 0) & (self._port_experts < self._exact_logits.shape[-1])).all(dim=-1)

    def _shares(self, logits: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """Return the shares of the port's experts by the golden's logits, [t,k], experts in ascending order."""
        assert logits is not None, "tokens are replayed where the logits are known"
        experts = self._port_experts[tokens].sort(dim=-1).values
        return weigh_experts(self._graph, logits[tokens], experts)

    def _compute_experts(self, weights: GoldenWeights) -> _Values:
        """Compute what the port's experts add."""
        tokens, states, logits = self._replayable, self._exact(Site.POST_NORM), self._exact_logits
        golden, golden_logits = self._golden(Site.POST_NORM), self._golden(Site.ROUTER_LOGITS)
        assert states is not None, "tokens are replayed where the experts' input is known"
        assert logits is not None, "tokens are replayed where the logits are known"
        assert golden is not None, "a twin is of a golden's own values"
        assert golden_logits is not None, "a twin is of a golden's own values"
        experts = self._port_experts[tokens]
        exact, rounded = (
            weigh_experts(self._graph, side[tokens], experts) for side in (logits, golden_logits)
        )
        if not self._graph.has_float32_shares:
            rounded = rounded.bfloat16().float()
        kinds = torch.tensor([RoundingKind.EXACT, RoundingKind.NEAREST, RoundingKind.RANDOM])
        # One call for the three ways, so that each expert is read and upcast once.
        outputs = upcast_experts(
            weights.tensors,
            torch.cat((states[tokens], golden[tokens], golden[tokens])),
            experts.repeat(len(kinds), 1),
            torch.cat((exact, rounded, rounded)),
            graph=weights.spec.graph,
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
