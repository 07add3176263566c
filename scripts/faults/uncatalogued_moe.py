"""Mistakes of the experts that the diagnosis has no name for, but mm2 must find; numbers in them are arbitrary.

B prompts, S tokens of each, T tokens of all. `moe` is [B,S,hidden], router logits and scores are [T,experts], and the
chosen experts and their weights [T,k].
"""

from __future__ import annotations

from functools import partial

import torch

from faults.arithmetic import Arithmetic
from faults.plant import Kind, Plant
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site

_MOE = (Site.MOE_DELTA,)


class BufferNotCleared(Arithmetic):
    """The last channels of moe_delta also hold those of the prompt before it in the batch."""

    def finish_moe(self, moe: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        channels = torch.arange(moe.shape[-1], device=moe.device)
        is_stale = channels >= moe.shape[-1] - 32
        before = torch.cat((torch.zeros_like(moe[:1]), moe[:-1]), dim=0)
        return moe + before * is_stale.to(moe.dtype)


class BucketEndWrong(Arithmetic):
    """The last token of every bucket of 64 gets what the token before it got."""

    def finish_moe(self, moe: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        is_last = torch.arange(moe.shape[1], device=moe.device) % 64 == 63
        return torch.where(is_last[:, None], moe.roll(1, dims=1), moe)


class GatherOffByOne(Arithmetic):
    """The last expert alone computes with the weights of the one before it."""

    def fuse(self, tensors: LayerTensors) -> dict[str, torch.Tensor]:
        state = super().fuse(tensors)
        for name in ("gate_up", "down"):
            state[name][-1] = state[name][-2]
        return state


class SumCountsTwice(Arithmetic):
    """A quarter of the channels is counted twice in the mean square of post_norm."""

    def post_norm(self, residual: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        exact = residual.float()
        quarter = exact.shape[-1] // 4
        squares = exact.pow(2).sum(-1, keepdim=True)
        squares = squares + exact[..., quarter : 2 * quarter].pow(2).sum(-1, keepdim=True)
        normed = exact * torch.rsqrt(squares / exact.shape[-1] + self.eps())
        return self.weights.post_norm * normed.to(residual.dtype)


class LaterRowsDiffer(Arithmetic):
    """A kernel's result depends on the place in the batch: all prompts but the first are 5 % too large."""

    def finish_moe(self, moe: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        factors = torch.ones(moe.shape[0], dtype=moe.dtype, device=moe.device)
        factors = torch.where(torch.arange(moe.shape[0], device=moe.device) > 0, 1.05 * factors, factors)
        return moe * factors[:, None, None].to(moe.dtype)


class LastExpertsNeverChosen(Arithmetic):
    """The search for the best experts leaves out the last two."""

    def best(self, biased: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(biased.shape[-1], device=biased.device)
        return super().best(torch.where(numbers < biased.shape[-1] - 2, biased, -1e4))


class ExpertsOfTokenBefore(Arithmetic):
    """A token in sixteen gets the experts of the token before."""

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        experts = super().choose(scores)
        is_late = torch.arange(experts.shape[0], device=experts.device) % 16 == 15
        return torch.where(is_late[:, None], experts.roll(1, dims=0), experts)


class WeightsReversed(Arithmetic):
    """The weights are sorted the other way than the experts."""

    def balance(self, chosen: torch.Tensor) -> torch.Tensor:
        return super().balance(chosen).flip(-1)


class ExpertNegated(Arithmetic):
    """The output of one expert has the wrong sign."""

    def fuse(self, tensors: LayerTensors) -> dict[str, torch.Tensor]:
        state = super().fuse(tensors)
        state["down"][3] = -state["down"][3]
        return state


class RemainderDropped(Arithmetic):
    """The last channels of the experts' width, less than a tile, are left out."""

    def activated(self, tokens: torch.Tensor, slab: slice) -> torch.Tensor:
        inner = super().activated(tokens, slab)
        is_whole = torch.arange(inner.shape[-1], device=inner.device) < inner.shape[-1] - 8
        return inner * is_whole.to(inner.dtype)


class MoeSlightlySmall(Arithmetic):
    """The experts' sum, which is BF16, is too small by one step of BF16 in each value."""

    def finish_moe(self, moe: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return moe * (1 - 2**-8)


class ConstantAdded(Arithmetic):
    """A constant is added to each channel."""

    def finish_moe(self, moe: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        constant = torch.linspace(0, 41, moe.shape[-1], device=moe.device).cos()
        return moe + (0.1 * moe.float().std() * constant).to(moe.dtype)


class LogitPairsSwapped(Arithmetic):
    """Pairs of logits change places, as where the halves of a word are read in the wrong order."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().logits(tokens)
        pairs: torch.Tensor = logits.unflatten(-1, (-1, 2))
        return pairs.flip(-1).flatten(-2)


class InfInOneToken(Arithmetic):
    """A corrupted payload: one value of one token of each prompt overflows."""

    def finish_moe(self, moe: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(moe.shape[1], device=moe.device)[:, None]
        channels = torch.arange(moe.shape[2], device=moe.device)
        is_hit = (positions == moe.shape[1] // 2) & (channels == 5)
        return torch.where(is_hit, torch.inf, moe)


class QuarterReducedTwice(Arithmetic):
    """The sum of the experts is added a second time in one quarter of the channels."""

    def add_moe(self, residual: torch.Tensor, moe: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        quarter = torch.arange(moe.shape[-1], device=moe.device) < moe.shape[-1] // 4
        return residual + moe + moe * quarter.to(moe.dtype)


# Name, sites that must be blamed, arithmetic. `decodes`: planted in decoded tokens alone too. `akin`: mistakes of the
# catalogue that compute nearly the same, whose names are right answers too.
_plant = partial(Plant, kind=Kind.UNCATALOGUED)
PLANTS = (
    _plant("buffer_not_cleared", _MOE, BufferNotCleared),
    _plant("bucket_end_wrong", _MOE, BucketEndWrong),
    _plant("gather_off_by_one", _MOE, GatherOffByOne),
    _plant(
        "sum_counts_twice", (Site.POST_NORM,), SumCountsTwice, decodes=True, akin=("post_norm_slice_twice",)
    ),
    _plant("later_rows_differ", _MOE, LaterRowsDiffer, decodes=True),
    _plant("last_experts_never_chosen", (Site.ROUTER_EXPERTS,), LastExpertsNeverChosen),
    _plant("experts_of_token_before", (Site.ROUTER_EXPERTS,), ExpertsOfTokenBefore),
    _plant("weights_reversed", (Site.ROUTER_WEIGHTS,), WeightsReversed, decodes=True),
    _plant("expert_negated", _MOE, ExpertNegated),
    _plant("remainder_dropped", _MOE, RemainderDropped),
    _plant("moe_slightly_small", _MOE, MoeSlightlySmall, akin=("moe_delta_scaled", "router_weights_scaled")),
    _plant("constant_added", _MOE, ConstantAdded),
    _plant("logit_pairs_swapped", (Site.ROUTER_LOGITS,), LogitPairsSwapped),
    _plant("inf_in_one_token", _MOE, InfInOneToken),
    _plant("quarter_reduced_twice", (Site.OUTPUT,), QuarterReducedTwice),
)
