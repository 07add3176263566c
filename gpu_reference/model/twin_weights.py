"""Where a golden's weights are while it runs: what its float32 twins compute with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FINAL_NORM, head_name


class TwinWeights(Protocol):
    """Gives the weights that the golden computes with."""

    def layer(self, layer: int) -> Mapping[str, torch.Tensor]:
        """A layer's weights by the hub's relative names, as the golden holds them; good until the next layer runs."""

    def head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The final norm's weight [H] and the lm_head's [vocab,H], as the golden holds them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointTwinWeights:
    """The weights of a golden that was loaded whole, read from the checkpoint once more.

    Args:
        reader: The checkpoint.
        spec: Its quantities.
        dtype: Dtype of the golden's weights.
    """

    reader: CheckpointReader
    spec: ModelSpec
    dtype: torch.dtype

    def layer(self, layer: int) -> Mapping[str, torch.Tensor]:
        """The layer's tensors, each read when it is asked for."""
        return LayerTensors.open(self.reader, self.spec, layer, self.dtype)

    def head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Final norm and lm_head, read now."""
        lm_head = head_name(self.spec)
        return self.reader.read_weight(FINAL_NORM, self.dtype), self.reader.read_weight(lm_head, self.dtype)
