"""ModelGraph: what the decoder layers of a model compute, as options in which families differ.

N heads, K kv heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from minimax_tools.text_enum import TextEnum


class QkNorm(TextEnum):
    """The channels that the norms of queries and keys take one mean over."""

    ALL_HEADS = "all heads"  # all channels of a token: weights are [N·D] and [K·D]
    PER_HEAD = "per head"  # the channels of one head: both weights are [D]


class RouterScores(TextEnum):
    """The function that makes scores of the router's logits."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"  # over all experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """The options of a graph; the defaults are MiniMax-M2's."""

    qk_norm: QkNorm = QkNorm.ALL_HEADS
    router_scores: RouterScores = RouterScores.SIGMOID
    # Whether gate, correction bias, logits and routing weights are float32 in a BF16 model. Else logits and weights
    # have the model's dtype, and scores alone are float32.
    has_float32_router: bool = True
    has_correction_bias: bool = True  # whether a bias is added to the scores for the choice of experts
    normalises_shares: bool = True  # whether the weights of the chosen experts are divided by their sum

    @property
    def ranks_logits(self) -> bool:
        """True if the order of the logits alone chooses the experts."""
        return self.router_scores is RouterScores.SOFTMAX and not self.has_correction_bias

    def other_options(self) -> dict[str, Any]:
        """Return the options that are not MiniMax-M2's, as JSON values by name."""
        return {
            option.name: str(value) if isinstance(value, TextEnum) else value
            for option in fields(self)
            if (value := getattr(self, option.name)) != option.default
        }
