"""OwnLayer: mm2's own reference layer in float32, site by site, with as little of its weights as its rows need.

What a golden or a port computed is held against it, and shares no line with it. One row of the batch runs at a time,
and of the experts one, from those that the rows are routed to.
B batch, S sequence, T real tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from minimax_tools.checkpoint.names import (
    CORRECTION_BIAS,
    EXPERT_MATRICES,
    GATE,
    INPUT_NORM,
    POST_NORM,
    expert_weight,
)
from minimax_tools.inputs import Inputs
from minimax_tools.reference.layer import ReferenceAttention, ReferenceExpert, ReferenceNorm, ReferenceRouter
from minimax_tools.sites import Site
from minimax_tools.spec import ModelSpec

_ATTENTION = "self_attn."


class OwnLayer:
    """One layer.

    Args:
        spec: The model.
        tensors: The layer's weights by the hub's relative names; each is read when it is needed, and upcast.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self._spec = spec
        self._tensors = tensors
        with torch.device("meta"):
            self._attention = ReferenceAttention(spec)
            self._input_norm = ReferenceNorm(spec.hidden_size, spec.rms_norm_eps)
            self._post_norm = ReferenceNorm(spec.hidden_size, spec.rms_norm_eps)
            self._expert = ReferenceExpert(spec)
        self._fill(self._attention, _ATTENTION)
        self._fill(self._input_norm, INPUT_NORM.removesuffix("weight"))
        self._fill(self._post_norm, POST_NORM.removesuffix("weight"))
        self._router = ReferenceRouter(spec)

    def run(
        self, hidden_states: torch.Tensor, inputs: Inputs, *, router_experts: torch.Tensor | None
    ) -> dict[Site, torch.Tensor]:
        """Every site but the input, float32 on the CPU; of padded rows no expert's output.

        Args:
            hidden_states: [B,S,H], what the layer is fed.
            inputs: Mask and positions.
            router_experts: int64 [B,S,k], the choice to replay; None for the layer's own. The site tells the own.
        """
        with torch.no_grad():
            rows = [
                self._run_attention(
                    hidden_states[row : row + 1].float(),
                    inputs.attention_mask[row : row + 1],
                    inputs.position_ids[row : row + 1],
                )
                for row in range(len(hidden_states))
            ]
            sites = {site: torch.cat([row[site] for row in rows]) for site in rows[0]}
            sites |= self._run_moe(sites[Site.POST_NORM], inputs.attention_mask.bool(), router_experts)
        sites[Site.OUTPUT] = sites[Site.ATTN_RESIDUAL] + sites[Site.MOE_DELTA]
        return sites

    def _run_attention(
        self, states: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> dict[Site, torch.Tensor]:
        attention = self._attention
        sites = {Site.INPUT_NORM: self._input_norm(states)}
        for site, projection in (
            (Site.Q_PROJ, attention.q_proj),
            (Site.K_PROJ, attention.k_proj),
            (Site.V_PROJ, attention.v_proj),
        ):
            sites[site] = projection(sites[Site.INPUT_NORM])
        sites[Site.Q_NORM] = attention.q_norm(sites[Site.Q_PROJ])
        sites[Site.K_NORM] = attention.k_norm(sites[Site.K_PROJ])
        for site, normed in ((Site.Q_ROPE, Site.Q_NORM), (Site.K_ROPE, Site.K_NORM)):
            sites[site] = attention.rotate(attention.heads(sites[normed]), position_ids)
        sites[Site.ATTN_CONTEXT] = attention.attend(
            sites[Site.Q_ROPE],
            attention.repeat(sites[Site.K_ROPE]),
            attention.repeat(attention.heads(sites[Site.V_PROJ])),
            attention_mask,
        )
        sites[Site.ATTN_DELTA] = attention.o_proj(sites[Site.ATTN_CONTEXT])
        sites[Site.ATTN_RESIDUAL] = states + sites[Site.ATTN_DELTA]
        sites[Site.POST_NORM] = self._post_norm(sites[Site.ATTN_RESIDUAL])
        return sites

    def _run_moe(
        self, states: torch.Tensor, real: torch.Tensor, router_experts: torch.Tensor | None
    ) -> dict[Site, torch.Tensor]:
        logits = states @ self._tensors[GATE].float().T
        own, weights = self._router(logits, self._tensors[CORRECTION_BIAS].float())
        chosen = own
        if router_experts is not None:
            chosen = router_experts.long()
            scores = logits.sigmoid().gather(-1, chosen)
            weights = scores / scores.sum(-1, keepdim=True)
        delta = torch.zeros_like(states)
        tokens, experts, shares = states[real], chosen[real], weights[real]
        total = torch.zeros_like(tokens)
        for number in experts.unique().tolist():
            of_token, place = torch.where(experts == number)
            output = self._run_expert(number, tokens[of_token])
            total.index_add_(0, of_token, output * shares[of_token, place, None])
        delta[real] = total
        return {
            Site.ROUTER_LOGITS: logits,
            Site.ROUTER_EXPERTS: own,
            Site.ROUTER_WEIGHTS: weights,
            Site.MOE_DELTA: delta,
        }

    def _run_expert(self, number: int, states: torch.Tensor) -> torch.Tensor:
        weights = {
            f"{matrix}.weight": self._tensors[expert_weight(number, matrix)].float()
            for matrix in EXPERT_MATRICES
        }
        output: torch.Tensor = torch.func.functional_call(self._expert, weights, (states,))
        return output

    def _fill(self, module: nn.Module, prefix: str) -> None:
        module.load_state_dict(
            {name: self._tensors[prefix + name].float() for name in module.state_dict()}, assign=True
        )
