"""Router: what a router makes of its logits: scores, the choice of experts, and their weights.

E experts, k experts per token; leading dims are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minimax_tools.model.graph import ModelGraph, RouterScores
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import CORRECTION_BIAS

if TYPE_CHECKING:
    import torch


def router_dtypes(graph: ModelGraph, dtype: str) -> dict[str, str]:
    """Return the dtypes of gate and correction bias, as far as there is one, in a model of a dtype, by name."""
    own = "float32" if graph.has_float32_router else dtype
    return {"router_gate": own} | ({"correction_bias": own} if graph.has_correction_bias else {})


def score_experts(graph: ModelGraph, logits: torch.Tensor) -> torch.Tensor:
    """Return the score of each expert, [...,E] as the logits."""
    return logits.softmax(-1) if graph.router_scores is RouterScores.SOFTMAX else logits.sigmoid()


def rank_without_bias(graph: ModelGraph, logits: torch.Tensor) -> torch.Tensor:
    """Return the ranking of the experts [...,E], before a correction bias is added (see `Router.ranking`).

    A softmax keeps the order of the logits, whose noise is alike in all tokens: that of its scores grows with them.
    """
    return logits if graph.ranks_logits else score_experts(graph, logits)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Router:
    """The router of a layer, its logits aside."""

    spec: ModelSpec
    bias: torch.Tensor | None  # correction bias, float32 [E]; None where the graph has none

    @classmethod
    def of(cls, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> Router:
        """Return the router of a layer with these weights, by mm2's relative names."""
        bias = tensors[CORRECTION_BIAS].float() if CORRECTION_BIAS in tensors else None
        return cls(spec=spec, bias=bias)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the score of each expert, [...,E] as the logits."""
        return score_experts(self.spec.graph, logits)

    def ranking(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the numbers [...,E] whose k largest choose the experts, as margins and their noise are measured."""
        return self.biased(rank_without_bias(self.spec.graph, logits))

    def ranking_error(self, logits: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        """Return the error [...,E] of the ranking by an error [...,E] of the logits."""
        if self.spec.graph.ranks_logits:
            return error
        scores = self.scores(logits)
        slope = scores * (1.0 - scores)
        if self.spec.graph.router_scores is RouterScores.SOFTMAX:
            # The errors of other logits move a score as far as its own.
            return 2.0 * slope * error.amax(dim=-1, keepdim=True)
        return slope * error

    def biased(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the numbers [...,E] whose k largest choose the experts."""
        return scores if self.bias is None else scores + self.bias.to(scores.device)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the chosen experts, int64 [...,k], best first."""
        return self.biased(scores).topk(self.spec.num_experts_per_tok, dim=-1).indices

    def shares(self, scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weights [...,k] of chosen experts [...,k]."""
        return _shares(self.spec.graph, scores, experts)


def weigh_experts(graph: ModelGraph, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return the weights [...,k] that logits [...,E] give to chosen experts [...,k]."""
    return _shares(graph, score_experts(graph, logits), experts)


def _shares(graph: ModelGraph, scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    chosen = scores.gather(-1, experts)
    shares = chosen / chosen.sum(-1, keepdim=True) if graph.normalises_shares else chosen
    return shares if graph.share_scale == 1 else shares * graph.share_scale
