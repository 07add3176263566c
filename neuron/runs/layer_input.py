"""LayerInput: what one forward pass of a layer is fed, rows of a batch and the past that they attend to.

B batch, S rows of this pass, P rows of past, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimax_tools.model.inputs import Inputs
from neuron.builtin.layer import KeyValues


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerInput:
    """One pass's input, on the CPU.

    Args:
        hidden_states: [B,S,H].
        attention_mask: [B,P+S] of 0/1, the past's rows first.
        position_ids: [B,S].
        past: Rotated keys and values of the rows before, [B,K,P,D] both; None where there are none.
    """

    hidden_states: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    past: KeyValues | None = None

    def __post_init__(self) -> None:
        num_past = 0 if self.past is None else self.past[0].shape[2]
        expected = (self.batch_size, num_past + self.num_rows)
        if tuple(self.attention_mask.shape) != expected:
            raise ValueError(f"the mask is {list(self.attention_mask.shape)}, expected {list(expected)}")

    @classmethod
    def of(cls, hidden_states: torch.Tensor, inputs: Inputs) -> LayerInput:
        """All rows of a batch in one pass."""
        return cls(
            hidden_states=hidden_states,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
        )

    @property
    def batch_size(self) -> int:
        """B."""
        return self.hidden_states.shape[0]

    @property
    def num_rows(self) -> int:
        """S."""
        return self.hidden_states.shape[1]

    def first(self, num_rows: int) -> LayerInput:
        """The first rows alone; only where there is no past."""
        assert self.past is None, "rows with a past are not cut"
        return LayerInput(
            hidden_states=self.hidden_states[:, :num_rows],
            attention_mask=self.attention_mask[:, :num_rows],
            position_ids=self.position_ids[:, :num_rows],
        )
