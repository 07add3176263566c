"""Mistakes of attention that the diagnosis has no name for, but mm2 must find; numbers in them are arbitrary.

Each overrides a stage of the right layer, `Arithmetic`; `edit` changes the hub's tensors before they are fused.
`tap` shows a site: it gets the site's name and value, and returns the value.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from faults.arithmetic import Arithmetic
from faults.plant import Kind, Plant
from faults.stages import Tap
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import K_PROJ, O_PROJ, Q_PROJ

_ROPE = (Site.Q_ROPE, Site.K_ROPE)


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


_plant = partial(Plant, kind=Kind.UNCATALOGUED)
# Name, wrong sites, class. `decodes`: it is also planted in decoded tokens alone; `prefills=False`: only there.
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
)
