"""RoundedLayer: copies of a decoder layer computed side by side in float32, each rounding in its own way.

One pass gives the exact layer, and samples of the noise that BF16 adds to a right layer. Copies round wherever some
right implementation does, attention's scores and the experts' partial sums too. Weights are read and upcast once.
B batch, S sequence, C copies, R rows (C·B), T real tokens, H hidden, N heads, K kv heads, D head_dim, k experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

from minimax_tools.model import weight_names
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.rounding import Rounding, RoundingKind
from minimax_tools.reference.upcast import ExpertRounding, upcast_experts

# Scores that are held at a time.
_MOST_SCORES = 2**22


class RoundedLayer:
    """A decoder layer, computed in several copies.

    Args:
        spec: The model.
        tensors: The layer's weights by the hub's relative names, of any float dtype; each is read when it is needed.
        kinds: How each copy rounds, ascending.
        seed: Of what is random.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, torch.Tensor],
        *,
        kinds: tuple[RoundingKind, ...],
        seed: int,
    ) -> None:
        self._spec = spec
        self._tensors = tensors
        self._kinds = kinds
        self._seed = seed

    def run(
        self, hidden_states: torch.Tensor, inputs: Inputs, *, router_experts: torch.Tensor | None
    ) -> tuple[dict[Site, torch.Tensor], ...]:
        """Compute every site but the input, for each copy, float32; no expert runs for padded rows.

        Args:
            hidden_states: [B,S,H], the layer's input.
            inputs: Mask and positions.
            router_experts: int64 [B,S,k], the choice that all copies replay; None for that of the copy that rounds to
                nearest, or of the first where none does. The site tells each copy's own choice, and the weights are
                those of what was replayed, in its order.
        """
        with torch.no_grad():
            sites = _Pass(self._spec, self._tensors, inputs, kinds=self._kinds, seed=self._seed).run(
                hidden_states.float(), router_experts
            )
        size = inputs.batch_size
        return tuple(
            {site: tensor[copy * size : (copy + 1) * size] for site, tensor in sites.items()}
            for copy in range(len(self._kinds))
        )


@dataclass(slots=True)
class _Pass:
    """A pass over all copies; roundings are numbered in the order of their calls."""

    spec: ModelSpec
    tensors: Mapping[str, torch.Tensor]
    inputs: Inputs
    kinds: tuple[RoundingKind, ...] = field(kw_only=True)
    seed: int = field(kw_only=True)
    draws: itertools.count[int] = field(default_factory=itertools.count)

    def run(self, hidden_rsh: torch.Tensor, router_experts: torch.Tensor | None) -> dict[Site, torch.Tensor]:
        spec, copies = self.spec, len(self.kinds)
        hidden = hidden_rsh.repeat(copies, 1, 1)
        mask = self.inputs.attention_mask.to(hidden.device)
        cos, sin = self._rotation(hidden.device)
        sites = {Site.INPUT_NORM: self._norm(hidden, weight_names.INPUT_NORM)}
        for projection, weight in (
            (Site.Q_PROJ, weight_names.Q_PROJ),
            (Site.K_PROJ, weight_names.K_PROJ),
            (Site.V_PROJ, weight_names.V_PROJ),
        ):
            sites[projection] = self._round(linear(sites[Site.INPUT_NORM], self._weight(weight, hidden)))
        sites[Site.Q_NORM] = self._norm(sites[Site.Q_PROJ], weight_names.Q_NORM)
        sites[Site.K_NORM] = self._norm(sites[Site.K_PROJ], weight_names.K_NORM)
        sites[Site.Q_ROPE] = self._rotate(sites[Site.Q_NORM], cos, sin)
        sites[Site.K_ROPE] = self._rotate(sites[Site.K_NORM], cos, sin)
        sites[Site.ATTN_CONTEXT] = self._attend(
            sites[Site.Q_ROPE], sites[Site.K_ROPE], self._heads(sites[Site.V_PROJ]), mask.repeat(copies, 1)
        )
        sites[Site.ATTN_DELTA] = self._add_halves(
            sites[Site.ATTN_CONTEXT], self._weight(weight_names.O_PROJ, hidden)
        )
        sites[Site.ATTN_RESIDUAL] = self._round(hidden + sites[Site.ATTN_DELTA])
        sites[Site.POST_NORM] = self._norm(sites[Site.ATTN_RESIDUAL], weight_names.POST_NORM)
        sites[Site.ROUTER_LOGITS] = linear(sites[Site.POST_NORM], self._weight(weight_names.GATE, hidden))
        scores = sites[Site.ROUTER_LOGITS].sigmoid()
        bias = self._weight(weight_names.CORRECTION_BIAS, hidden)
        sites[Site.ROUTER_EXPERTS] = (scores + bias).topk(spec.num_experts_per_tok, dim=-1).indices
        if router_experts is None:
            lead = self.kinds.index(RoundingKind.NEAREST) if RoundingKind.NEAREST in self.kinds else 0
            router_experts = sites[Site.ROUTER_EXPERTS].chunk(copies)[lead]
        experts = router_experts.long().to(hidden.device).repeat(copies, 1, 1)
        chosen = scores.gather(-1, experts)
        sites[Site.ROUTER_WEIGHTS] = chosen / chosen.sum(-1, keepdim=True)
        real = mask.bool().repeat(copies, 1)
        delta = torch.zeros_like(sites[Site.POST_NORM])
        delta[real] = upcast_experts(
            self.tensors,
            sites[Site.POST_NORM][real],
            experts[real],
            sites[Site.ROUTER_WEIGHTS][real],
            rounding=ExpertRounding(
                rounding=Rounding(seed=self.seed + 1),
                kinds=self._row_kinds().repeat_interleave(mask.sum(-1).repeat(copies).cpu()),
            ),
        )
        sites[Site.MOE_DELTA] = delta
        sites[Site.OUTPUT] = self._round(sites[Site.ATTN_RESIDUAL] + delta)
        return sites

    def _weight(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self.tensors[name].to(like.device, torch.float32)

    def _row_kinds(self) -> torch.Tensor:
        """Return the rounding kind of each row, [R]."""
        return torch.tensor(self.kinds).repeat_interleave(self.inputs.batch_size)

    def _round(self, values: torch.Tensor) -> torch.Tensor:
        return Rounding(seed=self.seed).apply(values, self._row_kinds(), draw=next(self.draws))

    def _norm(self, states: torch.Tensor, weight: str) -> torch.Tensor:
        normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.spec.rms_norm_eps)
        return self._round(self._round(normed).mul_(self._weight(weight, states)))

    def _heads(self, flat: torch.Tensor) -> torch.Tensor:
        """Reshape [R,S,heads·D] to [R,heads,S,D]."""
        heads: torch.Tensor = flat.unflatten(-1, (-1, self.spec.head_dim))
        return heads.transpose(1, 2)

    def _rotation(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of every position, [R,1,S,rotary_dim/2]: what they are rounded by, all heads share."""
        rotary_dim = self.spec.rotary_dim
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        positions = self.inputs.position_ids.to(device)[:, None, :, None].float()
        angles = (positions / self.spec.rope_theta**exponents).repeat(len(self.kinds), 1, 1, 1)
        return self._round(angles.cos()), self._round(angles.sin())

    def _rotate(self, flat: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = self._heads(flat)
        first, second = heads[..., : self.spec.rotary_dim].chunk(2, dim=-1)
        turned = (
            self._round(self._round(first * cos) - self._round(second * sin)),
            self._round(self._round(second * cos) + self._round(first * sin)),
        )
        return torch.cat((*turned, heads[..., self.spec.rotary_dim :]), dim=-1)

    def _attend(
        self, q_rnsd: torch.Tensor, k_rksd: torch.Tensor, v_rksd: torch.Tensor, mask_rs: torch.Tensor
    ) -> torch.Tensor:
        """Compute causal attention, padded keys hidden: [R,S,N·D]."""
        groups = self.spec.num_attention_heads // self.spec.num_key_value_heads
        num_rows, num_heads, length, _ = q_rnsd.shape
        causal = torch.ones(length, length, dtype=torch.bool, device=q_rnsd.device).tril()
        context = torch.empty_like(q_rnsd)
        block = max(_MOST_SCORES // length**2, 1)
        kinds = self._row_kinds()
        for row in range(num_rows):
            visible = causal & mask_rs[row].bool()
            for start in range(0, num_heads, block):
                heads = slice(start, min(start + block, num_heads))
                keys, values = (
                    side[row].repeat_interleave(groups, dim=0)[heads] for side in (k_rksd, v_rksd)
                )
                scores = self._round_row(q_rnsd[row][heads] @ keys.transpose(-1, -2), kinds[row])
                scores = self._round_row(scores * self.spec.head_dim**-0.5, kinds[row])
                # A finite minimum: a padded query that sees nothing must not become NaN.
                scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
                shares = self._round_row(scores.softmax(dim=-1), kinds[row])
                context[row, heads] = shares @ values
        return self._round(context.transpose(1, 2).flatten(2))

    def _round_row(self, values: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return Rounding(seed=self.seed).apply(values[None], kind[None], draw=next(self.draws))[0]

    def _add_halves(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply in halves that are rounded before they are added, as two ranks of tensor parallelism do."""
        pieces = zip(states.chunk(2, dim=-1), weight.chunk(2, dim=-1), strict=True)
        first, second = (self._round(linear(part, columns)) for part, columns in pieces)
        return self._round(first + second)
