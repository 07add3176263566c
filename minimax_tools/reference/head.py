"""Float32Head: final norm and lm_head in float32, multiplied a slab of the vocabulary at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from minimax_tools.model.sites import ModelSite
from minimax_tools.reference.rounding import Rounding, RoundingKind

# Rows of lm_head that are upcast at a time: at H 3072, 200 MB in float32 instead of 2.5 GB for 200 064 rows.
_SLAB_ROWS = 16384


@dataclass(frozen=True, slots=True, eq=False)
class Float32Head:
    """The model's head in float32."""

    norm: torch.Tensor  # weight of the final norm [H], of any float dtype
    lm_head: torch.Tensor  # weight of lm_head [vocab,H], of any float dtype; upcast a slab of rows at a time
    eps: float = field(kw_only=True)  # epsilon of the final norm

    def run(self, hidden_states: torch.Tensor) -> dict[ModelSite, torch.Tensor]:
        """Compute final_norm [B,S,H] and logits [B,S,vocab], float32, of the last layer's output [B,S,H]."""
        normed = self.normalise(hidden_states)
        return {ModelSite.FINAL_NORM: normed, ModelSite.LOGITS: self.score(normed)}

    def run_randomly(self, hidden_states: torch.Tensor, *, seed: int) -> dict[ModelSite, torch.Tensor]:
        """Compute both sites with random roundings where BF16 rounds: a sample of other right implementations."""
        rounding = Rounding(seed=seed)

        def round_randomly(values: torch.Tensor, draw: int) -> torch.Tensor:
            every_row = ((RoundingKind.RANDOM, slice(len(values))),)
            return rounding.apply(values.contiguous(), every_row, draw=draw)

        states = hidden_states.to(torch.float32)
        normed = states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + self.eps)
        normed = round_randomly(round_randomly(normed, 0) * self.norm.to(torch.float32), 1)
        return {ModelSite.FINAL_NORM: normed, ModelSite.LOGITS: round_randomly(self.score(normed), 2)}

    def normalise(self, hidden_states: torch.Tensor, *, rounds: bool = False) -> torch.Tensor:
        """Compute final_norm [B,S,H] in float32; if `rounds`, in BF16, rounded before and after the weighting."""
        normed = self.scale(hidden_states)
        if rounds:
            return (normed.bfloat16().float() * self.norm.to(torch.float32)).bfloat16()
        return normed * self.norm.to(torch.float32)

    def scale(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Divide [...,H] by its root mean square, float32: the final norm before its weight."""
        states = hidden_states.to(torch.float32)
        return states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + self.eps)

    def score(self, normed: torch.Tensor) -> torch.Tensor:
        """Compute logits [B,S,vocab], float32, of final_norm [B,S,H]."""
        states = normed.to(torch.float32)
        slabs = [states @ slab.to(torch.float32).T for slab in self.lm_head.split(_SLAB_ROWS)]
        return torch.cat(slabs, dim=-1)
