"""Mistakes that the diagnosis has no name for, but mm2 must find; numbers in them are arbitrary.

Each overrides a stage of the right layer, `Arithmetic`; `edit` changes the hub's tensors before they are fused.
`tap` shows a site: it gets the site's name and value, and returns the value.

B prompts, S tokens of each, T tokens of all. `moe` is [B,S,hidden], router logits and scores are [T,experts], and the
chosen experts and their weights [T,k].
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from faults.arithmetic import Arithmetic, Tap
from faults.plant import Kind, Plant
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import K_PROJ, O_PROJ, Q_PROJ

_ROPE, _MOE = (Site.Q_ROPE, Site.K_ROPE), (Site.MOE_DELTA,)


class HeadZero(Arithmetic):
    """The queries of one head were never loaded."""

    def edit(self, tensors: LayerTensors) -> None:
        weight, width = tensors[Q_PROJ].clone(), self.config.head_dim
        weight[5 * width : 6 * width] = 0
        tensors[Q_PROJ] = weight


class OutputHeadZero(Arithmetic):
    """The columns of o_proj of one head were never loaded."""

    def edit(self, tensors: LayerTensors) -> None:
        weight, width = tensors[O_PROJ].clone(), self.config.head_dim
        weight[:, 5 * width : 6 * width] = 0
        tensors[O_PROJ] = weight


class Saturating(Arithmetic):
    """A cast saturates at three standard deviations of a token's values."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        context = super().attend(q, k, v, mask)
        limit = 3 * context.float().std(-1, keepdim=True).to(context.dtype)
        return torch.minimum(torch.maximum(context, -limit), limit)


class TileTwice(Arithmetic):
    """A tile of o_proj's inner dim is added twice."""

    def project_out(self, context: torch.Tensor) -> torch.Tensor:
        tile = slice(128, 256)
        again = functional.linear(context[..., tile], self.weights.o_proj[:, tile])
        return super().project_out(context) + again


class KeysQuantised(Arithmetic):
    """Rotated keys are cached in FP8 where nobody asked for it."""

    def norm_and_rotate(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, tap: Tap
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = tap("q_norm", self.q_norm(q)), tap("k_norm", self.k_norm(k))
        keys = self.rotate(self.heads(k), positions)
        return (
            tap("q_rope", self.rotate(self.heads(q), positions)),
            tap("k_rope", keys.float().to(torch.float8_e4m3fn).to(keys.dtype)),
        )


class ValueHalvesSwapped(Arithmetic):
    """The halves of every value head change places."""

    def project(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().project(normed)
        halves = v.unflatten(-1, (-1, 2, self.config.head_dim // 2))
        return q, k, halves.flip(-2).flatten(-3)


class LastHeadReadsFirst(Arithmetic):
    """The last query head reads the first kv head."""

    def repeat(self, heads: torch.Tensor) -> torch.Tensor:
        right = super().repeat(heads)
        return torch.cat((right[:, :-1], heads[:, :1]), dim=1)


class SoftCapped(Arithmetic):
    """Attention's scores are capped, as another model's are."""

    def attention_scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return 2 * torch.tanh(super().attention_scores(q, k) / 2)


class OldestForgotten(Arithmetic):
    """The first token of a prompt was overwritten in the cache: later passes do not see it."""

    def visible(self, mask: torch.Tensor, num_queries: int) -> torch.Tensor:
        is_first = (mask.cumsum(-1) == 1) & mask.bool()  # [B, past and present tokens]
        is_query = torch.zeros_like(is_first)
        is_query[:, -num_queries:] = True
        # A pass that holds the first token still sees it: only a later pass reads it from the cache.
        is_gone = is_first & ~is_query
        return super().visible(mask, num_queries) & ~is_gone[:, None, None, :]


class StepAhead(Arithmetic):
    """A pass counts its own positions one too high."""

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        return super().angles(positions + 1)


class ChannelsRolled(Arithmetic):
    """The last quarter of o_proj's rows is one row off."""

    def edit(self, tensors: LayerTensors) -> None:
        weight = tensors[O_PROJ]
        start = weight.shape[0] * 3 // 4
        tensors[O_PROJ] = torch.cat((weight[:start], weight[start:].roll(1, dims=0)))


class KeysSlightlyLarge(Arithmetic):
    """The weights of the keys are larger by one step of BF16."""

    def edit(self, tensors: LayerTensors) -> None:
        tensors[K_PROJ] = tensors[K_PROJ] * (1 + 2**-7)


class ResidualGarbage(Arithmetic):
    """Garbage in memory is added to the residual."""

    def add_attention(self, states: torch.Tensor, delta: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        garbage = torch.linspace(0, 97, states.shape[-1], device=states.device).sin()
        return states + delta + (0.5 * delta.float().std() * garbage).to(states.dtype)


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


# Name, sites that must be blamed, arithmetic. `decodes`: planted in decoded tokens alone too; `prefills=False`: only
# there. `akin`: mistakes of the catalogue that compute nearly the same, whose names are right answers too.
_plant = partial(Plant, kind=Kind.UNCATALOGUED)
PLANTS = (
    _plant("head_zero", (Site.Q_PROJ,), HeadZero),
    _plant("output_head_zero", (Site.ATTN_DELTA,), OutputHeadZero),
    _plant("saturating_cast", (Site.ATTN_CONTEXT,), Saturating),
    _plant("tile_twice", (Site.ATTN_DELTA,), TileTwice, decodes=True),
    _plant("keys_quantised", (Site.K_ROPE,), KeysQuantised, decodes=True),
    _plant("value_halves_swapped", (Site.V_PROJ,), ValueHalvesSwapped, decodes=True),
    _plant("last_head_reads_first", (Site.ATTN_CONTEXT,), LastHeadReadsFirst, decodes=True),
    _plant("scores_capped", (Site.ATTN_CONTEXT,), SoftCapped),
    _plant("oldest_forgotten", (Site.ATTN_CONTEXT,), OldestForgotten, prefills=False, decodes=True),
    _plant("step_ahead", _ROPE, StepAhead, decodes=True),
    _plant("channels_rolled", (Site.ATTN_DELTA,), ChannelsRolled),
    _plant("keys_slightly_large", (Site.K_PROJ,), KeysSlightlyLarge),
    _plant("residual_garbage", (Site.ATTN_RESIDUAL,), ResidualGarbage),
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
