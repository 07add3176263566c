"""The example port with gate and correction bias rounded to BF16, as a model is that was cast to BF16 whole."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples"))
import port

ROUNDED = ("moe.router.weight", "moe.router.correction_bias")


class DecoderLayer(port.DecoderLayer):
    """The port, its router rounded."""

    def convert_state_dict(self, tensors, config, layer_idx):
        """Round the router's two tensors."""
        state = super().convert_state_dict(tensors, config, layer_idx)
        return state | {name: state[name].to(torch.bfloat16).to(state[name].dtype) for name in ROUNDED}
