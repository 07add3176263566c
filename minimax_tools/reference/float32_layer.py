"""Float32Layer: mm2's own reference layer in float32, site by site, with as little of its weights as its rows need.

What a golden or a port computed is held against it, and shares no line with it. One head of one row of the batch
attends at a time, and of the experts runs one, from those that the rows are routed to.
B batch, S sequence, T real tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    EXPERT_MATRICES,
    GATE,
    INPUT_NORM,
    POST_NORM,
    expert_weight,
)
from minimax_tools.reference.layer import ReferenceAttention, ReferenceExpert, ReferenceNorm, ReferenceRouter

_ATTENTION = "self_attn."
_Values = Mapping[Site, torch.Tensor]
_Stage = Callable[[_Values, Inputs], torch.Tensor]


class Float32Layer:
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
        self._stages = self._make_stages()

    def run(
        self, hidden_states: torch.Tensor, inputs: Inputs, *, router_experts: torch.Tensor | None
    ) -> dict[Site, torch.Tensor]:
        """Every site but the input, float32 on the CPU; of padded rows no expert's output.

        Args:
            hidden_states: [B,S,H], what the layer is fed.
            inputs: Mask and positions.
            router_experts: int64 [B,S,k], the choice to replay; None for the layer's own. The site tells the own.
        """
        given = {} if router_experts is None else {Site.ROUTER_EXPERTS: router_experts.long()}
        sites = {Site.INPUT: hidden_states.float()}
        for site in self._stages:
            sites[site] = self.compute(site, {**sites, **given}, inputs)
        del sites[Site.INPUT]
        return sites

    def compute(self, site: Site, values: Mapping[Site, torch.Tensor], inputs: Inputs) -> torch.Tensor:
        """One site, float32 on the CPU (experts int64), from the sites that it is computed from.

        Args:
            site: Any but the input.
            values: At least `SITE_INPUTS` of it, float32 (experts int64), in the shapes that `Site` gives.
            inputs: Mask and positions.
        """
        with torch.no_grad():
            return self._stages[site](values, inputs)

    def _make_stages(self) -> dict[Site, _Stage]:
        attention = self._attention
        return {
            Site.INPUT_NORM: lambda at, _: self._input_norm(at[Site.INPUT]),
            Site.Q_PROJ: lambda at, _: attention.q_proj(at[Site.INPUT_NORM]),
            Site.K_PROJ: lambda at, _: attention.k_proj(at[Site.INPUT_NORM]),
            Site.V_PROJ: lambda at, _: attention.v_proj(at[Site.INPUT_NORM]),
            Site.Q_NORM: lambda at, _: attention.q_norm(at[Site.Q_PROJ]),
            Site.K_NORM: lambda at, _: attention.k_norm(at[Site.K_PROJ]),
            Site.Q_ROPE: lambda at, inputs: self._rotate(at[Site.Q_NORM], inputs),
            Site.K_ROPE: lambda at, inputs: self._rotate(at[Site.K_NORM], inputs),
            Site.ATTN_CONTEXT: self._attend,
            Site.ATTN_DELTA: lambda at, _: attention.o_proj(at[Site.ATTN_CONTEXT]),
            Site.ATTN_RESIDUAL: lambda at, _: at[Site.INPUT] + at[Site.ATTN_DELTA],
            Site.POST_NORM: lambda at, _: self._post_norm(at[Site.ATTN_RESIDUAL]),
            Site.ROUTER_LOGITS: lambda at, _: at[Site.POST_NORM] @ self._tensors[GATE].float().T,
            Site.ROUTER_EXPERTS: self._choose_experts,
            Site.ROUTER_WEIGHTS: self._weigh_experts,
            Site.MOE_DELTA: self._run_experts,
            Site.OUTPUT: lambda at, _: at[Site.ATTN_RESIDUAL] + at[Site.MOE_DELTA],
        }

    def _rotate(self, flat: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return self._attention.rotate(self._attention.heads(flat), inputs.position_ids)

    def _attend(self, at: _Values, inputs: Inputs) -> torch.Tensor:
        attention = self._attention
        queries, keys = at[Site.Q_ROPE], attention.repeat(at[Site.K_ROPE])
        values = attention.repeat(attention.heads(at[Site.V_PROJ]))
        rows = []
        for row in range(inputs.batch_size):
            mask = inputs.attention_mask[row : row + 1]
            # The scores of one head are S x S values.
            heads = [
                attention.attend(q[None, None], k[None, None], v[None, None], mask)
                for q, k, v in zip(queries[row], keys[row], values[row], strict=True)
            ]
            rows.append(torch.cat(heads, dim=-1))
        return torch.cat(rows)

    def _choose_experts(self, at: _Values, _: Inputs) -> torch.Tensor:
        experts: torch.Tensor
        experts, _weights = self._router(at[Site.ROUTER_LOGITS], self._tensors[CORRECTION_BIAS].float())
        return experts

    def _weigh_experts(self, at: _Values, _: Inputs) -> torch.Tensor:
        scores = at[Site.ROUTER_LOGITS].sigmoid().gather(-1, at[Site.ROUTER_EXPERTS])
        return scores / scores.sum(-1, keepdim=True)

    def _run_experts(self, at: _Values, inputs: Inputs) -> torch.Tensor:
        real = inputs.attention_mask.bool()
        tokens = at[Site.POST_NORM][real]
        experts, shares = at[Site.ROUTER_EXPERTS][real], at[Site.ROUTER_WEIGHTS][real]
        total = torch.zeros_like(tokens)
        for number in experts.unique().tolist():
            of_token, place = torch.where(experts == number)
            output = self._run_expert(number, tokens[of_token])
            total.index_add_(0, of_token, output * shares[of_token, place, None])
        delta = torch.zeros_like(at[Site.POST_NORM])
        delta[real] = total
        return delta

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
