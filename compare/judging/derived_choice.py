"""DerivedChoice: the experts that a port must have chosen, from what it shows of its router or of its experts' output.

If it shows its choice too, the two must agree. Where BF16 noise may turn two scores round, a right port may have chosen
either expert: the output of every choice within reach of noise is computed, and the port judged by the nearest. A token
with too many choices stays open, and so do tokens beyond a number of them: a wrong port shows in the others.
T judged tokens, c choices of one token, E experts, k experts per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from compare.judging.routing import RouterNoise, flipped_tokens
from compare.noise.rho import token_ratios
from compare.noise.rows import Rows, square_difference
from compare.sides.golden_weights import GoldenWeights
from compare.sides.sides import Sides, spread_evenly
from minimax_tools.metrics.noise_floor import choice_margin
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS, GATE
from minimax_tools.reference.float32_stages import expert_shares
from minimax_tools.reference.upcast import upcast_experts

# Error of float32 logits that are summed in another order, relative to the token's largest logit.
_FLOAT32_ERROR = 1e-5
# Largest rounding error of BF16, relative to the value.
_BFLOAT16_ERROR = 2.0**-8


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
    is_rounded = logits is not None and torch.equal(logits, logits.bfloat16().float())
    if logits is None:
        logits = shown[Site.POST_NORM] @ weights.tensors[GATE].float().T
    sizes = logits.abs()
    error = _BFLOAT16_ERROR * sizes if is_rounded else _FLOAT32_ERROR * sizes.amax(dim=-1, keepdim=True)
    scores = logits.sigmoid()
    # The sigmoid's slope turns an error of the logits into one of the scores; two scores next to the margin may err.
    reach = (scores * (1.0 - scores) * error).amax(dim=-1)
    biased = scores + weights.tensors[CORRECTION_BIAS].float()
    return DerivedChoice(
        experts=biased.topk(k, dim=-1).indices, is_sure=choice_margin(biased, k) > 2.0 * reach
    )


# A token whose ρ is at most this has the golden's experts.
_PLAINLY_ALIKE = 1.2
# A token with more choices stays open.
_MOST_CHOICES = 24
# Tokens whose choices are computed. A right port has few above the ρ; a wrong one shows in these.
_MOST_TOKENS = 256


def find_nearest_choice(
    sides: Sides, layer: int, *, site: Site, rows: Rows, noise: RouterNoise
) -> DerivedChoice | None:
    """Find the choice nearest to each token of a port, among those that noise may have made.

    The layer's input is the golden's. The site is `moe_delta` or `output`; its rows, all real tokens of both sides,
    have a floor and are finite. `noise` is the margin and noise of the golden's choice. None if the weights are not
    known, or the golden does not hold its experts' input or, for the output, the residual stream.
    """
    # All are [T,…]. The exact values are the float32 twin's, or the golden's own if it kept no
    # twin. The stream is what the experts' sum is added to.
    golden = sides.read_golden(layer, Site.ROUTER_EXPERTS)
    states, logits = sides.read_exact(layer, Site.POST_NORM), sides.read_exact(layer, Site.ROUTER_LOGITS)
    stream = None if site is Site.MOE_DELTA else sides.read_stream(layer, is_exact=True)
    if sides.weights is None or golden is None or states is None or logits is None:
        return None
    if stream is None and site is Site.OUTPUT:
        return None
    experts = golden.long()
    reach = noise.reach
    # Noise may have flipped these tokens, and they are not plainly like the golden.
    is_open = noise.is_fragile() & (token_ratios(rows) > _PLAINLY_ALIKE)
    if not bool(is_open.any()):
        return DerivedChoice(experts=experts, is_sure=torch.ones_like(is_open))
    open_tokens = is_open.nonzero()[:, 0]
    with sides.weights.open_layer(layer, sides.reference) as weights:
        scores = logits.sigmoid() + weights.tensors[CORRECTION_BIAS].float()
        # None for a token with too many choices.
        choices_of = {
            token: _choices_within(scores[token], experts[token], float(reach[token]))
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
            weights.tensors, states[tokens], candidates, expert_shares(logits[tokens].sigmoid(), candidates)
        )
    if stream is not None:
        added = stream[tokens] + added
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
