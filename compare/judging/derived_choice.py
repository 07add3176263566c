"""DerivedChoice: the experts that a port must have chosen, derived from what it shows of its router.

Another tool's dump often keeps the router's logits or its input, and not the choice that follows from them. If it keeps
the choice too, the two must agree. T real tokens, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compare.judging.routing import flipped_tokens
from compare.sides.golden_weights import GoldenWeights
from compare.sides.sides import Sides
from minimax_tools.metrics.noise_floor import choice_margin
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS, GATE

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

    Raises:
        IncomparableError: The weights are another model's.
        CheckpointError: They cannot be read.
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

    Raises:
        IncomparableError: The weights are another model's.
        CheckpointError: They cannot be read.
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
