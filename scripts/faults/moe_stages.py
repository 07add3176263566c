"""Arithmetic of a layer from attn_residual to its output, each stage a method that a mistake may override.

Each expert computes all tokens, and a token's share in an expert that it did not choose is 0: no shape depends on the
routing. A slab is the experts that are computed at once.
B prompts, S tokens of each, T tokens of all (B·S), H hidden, E experts, k of them per token, I their width.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from faults.stages import Stages

_SLAB = 16  # number of experts in a slab


class MoeStages(Stages):
    """Norm, router and experts."""

    def post_norm(self, residual: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Compute post_norm, [B,S,H]; a mistake may take `states`, the layer's input, for the residual."""
        return self.block_norm(residual, self.weights.post_norm)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the router's logits, float32 [T,E]."""
        logits: torch.Tensor = tokens.float() @ self.weights.gate.T
        return logits

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute the scores of logits [T,E], each between 0 and 1."""
        return logits.sigmoid()

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Choose the experts of each token, int64 [T,k]; the bias takes part in nothing else."""
        return self.best(scores + self.bias())

    def bias(self) -> torch.Tensor:
        """Return the correction bias, float32 [E]."""
        return self.weights.bias

    def best(self, biased: torch.Tensor) -> torch.Tensor:
        """Return the experts with the highest biased scores [T,E]."""
        return biased.topk(self.config.num_experts_per_tok, dim=-1).indices

    def weigh(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Compute the routing weights, float32 [T,k]: unbiased scores that sum to one."""
        return self.balance(self.scores(logits).gather(-1, experts))

    def balance(self, chosen: torch.Tensor) -> torch.Tensor:
        """Divide the chosen scores [T,k] by their sum."""
        return chosen / chosen.sum(-1, keepdim=True)

    def mix_experts(
        self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, real: torch.Tensor
    ) -> torch.Tensor:
        """Run the tokens [T,H] through all experts, and add up with the routing weights.

        Chosen experts and their weights are [T,k]; `real` is bool [T], False for padding.
        """
        affinities = self.affinities(experts, weights, real)
        total = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        for start in range(0, affinities.shape[1], _SLAB):
            slab = slice(start, start + _SLAB)
            shares = affinities[:, slab].T[:, :, None]
            total = self.accumulate(total, self.expert_outputs(tokens, slab, shares))
        return total.to(tokens.dtype)

    def affinities(self, experts: torch.Tensor, weights: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Compute each expert's share, float32 [T,E]; 0 if the token did not choose it. A mistake may use `real`."""
        numbers = torch.arange(self.config.num_local_experts, device=experts.device)
        return torch.where(experts[:, :, None] == numbers, weights[:, :, None], 0.0).sum(1)

    def expert_outputs(self, tokens: torch.Tensor, slab: slice, shares: torch.Tensor) -> torch.Tensor:
        """Compute the output of each expert times its share [slab,T,1], float32 [slab,T,H]."""
        inner = self.activated(tokens, slab)
        return torch.matmul(inner, self.weights.down[slab].transpose(1, 2)).float() * shares

    def activated(self, tokens: torch.Tensor, slab: slice) -> torch.Tensor:
        """Compute the activation [slab,T,I] of [T,H]; a mistake may give each expert its own input [slab,T,H]."""
        gate, up = self.cut_gate_up(torch.matmul(tokens, self.weights.gate_up[slab].transpose(1, 2)))
        return self.activate(gate, up)

    def cut_gate_up(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut […,2I] into gate and up."""
        gate, up = both.chunk(2, dim=-1)
        return gate, up

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Compute SwiGLU."""
        return functional.silu(gate) * up

    def accumulate(self, total: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Add the outputs of a slab [slab,T,H] to the sum so far [T,H]."""
        return total + outputs.sum(0)

    def finish_moe(self, moe: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return moe_delta [B,S,H]; a mistake may use the mask [B,S]."""
        return moe

    def add_moe(self, residual: torch.Tensor, moe: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Add moe_delta to attn_residual: the layer's output [B,S,H]; a mistake may add it to `states`, its input."""
        return residual + moe
