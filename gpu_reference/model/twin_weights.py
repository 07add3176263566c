"""The weights of a golden while it runs, for its float32 twins."""

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
    """A source of the weights that a golden computes with."""

    def layer(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return a layer's weights by the hub's relative names; valid until the next layer runs."""

    def head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of the final norm [H] and the lm_head [vocab,H]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointTwinWeights:
    """The weights of a golden that was loaded whole, read again in its `dtype`: itself, it holds the experts fused."""

    reader: CheckpointReader
    spec: ModelSpec
    dtype: torch.dtype

    def layer(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return the layer's tensors; each is read when it is looked up."""
        return LayerTensors.open(self.reader, self.spec, layer, self.dtype)

    def head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the final norm [H] and the lm_head [vocab,H]."""
        lm_head = head_name(self.spec)
        return self.reader.read_weight(FINAL_NORM, self.dtype), self.reader.read_weight(lm_head, self.dtype)
