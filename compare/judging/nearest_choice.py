"""NearestChoice: the experts of a port that shows neither its choice nor its router, told by what left the experts.

Where two scores are so close that noise may turn them round, a port that is right may have chosen either. So every
choice within reach is computed, and the port is held against the one that it came nearest to. A token is set aside only
where there are too many of them, or too many such tokens: then the port is wrong, which the others show.
T real tokens, n of them with several choices, c choices of those, E experts, k experts per token, H hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from compare.judging.derived_choice import DerivedChoice
from compare.judging.routing import RouterNoise
from compare.noise.rho import token_ratios
from compare.noise.rows import Rows
from compare.noise.squared_errors import square_difference
from compare.sides.batch import spread_evenly
from compare.sides.sides import Sides
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS
from minimax_tools.reference.float32_stages import expert_shares
from minimax_tools.reference.upcast import upcast_experts

# A token so near to the golden, in units of what rounding may cost there, has its experts.
_PLAINLY_ALIKE = 1.2
_MOST_CHOICES = 24
# Of a port that is right few tokens are not; of one that is wrong so many tell it.
_MOST_TOKENS = 256


def find_nearest_choice(
    sides: Sides, layer: int, *, site: Site, rows: Rows, noise: RouterNoise
) -> DerivedChoice | None:
    """Find the choice that each token of a port came nearest to, among those that noise may have made.

    Args:
        sides: The captures; the layer's input is the golden's.
        layer: The layer.
        site: `moe_delta` or `output`, which both sides hold.
        rows: That site's, with a floor; both sides' are numbers.
        noise: How close the golden's choice was.

    Returns:
        None where the weights are not known, or the golden does not hold its experts' input.

    Raises:
        IncomparableError: The weights are another model's.
        CheckpointError: They cannot be read.
    """
    golden = sides.read_golden(layer, Site.ROUTER_EXPERTS)
    router_values = {one: sides.read_exact(layer, one) for one in (Site.POST_NORM, Site.ROUTER_LOGITS)}
    stream = None if site is Site.MOE_DELTA else sides.read_stream(layer, is_exact=True)
    states, logits = router_values[Site.POST_NORM], router_values[Site.ROUTER_LOGITS]
    if sides.weights is None or golden is None or states is None or logits is None:
        return None
    if stream is None and site is Site.OUTPUT:
        return None
    experts = golden.long()
    reach = noise.reach
    is_open = noise.is_fragile() & (token_ratios(rows) > _PLAINLY_ALIKE)
    if not bool(is_open.any()):
        return DerivedChoice(experts=experts, is_sure=torch.ones_like(is_open))
    open_tokens = is_open.nonzero()[:, 0]
    with sides.weights.open_layer(layer, sides.reference) as weights:
        scores = logits.sigmoid() + weights.tensors[CORRECTION_BIAS].float()
        choices = {
            token: _choices_within(scores[token], experts[token], float(reach[token]))
            for token in open_tokens[spread_evenly(len(open_tokens), _MOST_TOKENS)].tolist()
        }
        known = {token: found for token, found in choices.items() if found is not None}
        is_sure = ~is_open
        is_sure[list(known)] = True
        if not known:
            return DerivedChoice(experts=experts, is_sure=is_sure)
        tokens = torch.tensor([token for token, found in known.items() for _ in found])
        candidates = torch.cat(list(known.values()))
        added = upcast_experts(
            weights.tensors, states[tokens], candidates, expert_shares(logits[tokens].sigmoid(), candidates)
        )
    if stream is not None:
        added = stream[tokens] + added
    distance = square_difference(added, rows.target[tokens], massive=rows.massive).whole
    nearest = experts.clone()
    for token in known:
        of_token = (tokens == token).nonzero()[:, 0]
        nearest[token] = candidates[of_token[distance[of_token].argmin()]]
    return DerivedChoice(experts=nearest, is_sure=is_sure)


def _choices_within(scores: torch.Tensor, chosen: torch.Tensor, reach: float) -> torch.Tensor | None:
    """List the choices that noise may have made of scores [E] in place of `chosen` [k]: int64 [c,k].

    Experts may trade places where no one that was dropped is further than `reach` above one that came for it.
    """
    is_chosen = torch.zeros_like(scores, dtype=torch.bool)
    is_chosen[chosen] = True
    least, most = scores[is_chosen].min(), scores[~is_chosen].max()
    droppable = (is_chosen & (scores <= most + reach)).nonzero()[:, 0].tolist()
    eligible = (~is_chosen & (scores >= least - reach)).nonzero()[:, 0].tolist()
    found = list(itertools.islice(_exchanges(scores, droppable, eligible, reach), _MOST_CHOICES))
    if len(found) == _MOST_CHOICES:
        return None
    kept = chosen.tolist()
    return torch.tensor(
        [kept, *([one for one in kept if one not in dropped] + list(added) for dropped, added in found)]
    )


def _exchanges(
    scores: torch.Tensor, droppable: list[int], eligible: list[int], reach: float
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield which experts noise may have exchanged for which others, the fewest first."""
    for count in range(1, min(len(droppable), len(eligible)) + 1):
        for dropped in itertools.combinations(droppable, count):
            highest = max(float(scores[expert]) for expert in dropped)
            within = [expert for expert in eligible if highest - float(scores[expert]) <= reach]
            for added in itertools.combinations(within, count):
                yield dropped, added
