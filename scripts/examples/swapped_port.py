"""The example port with a real porting bug: gate and up are swapped in layer 5, and in no other layer.

The cosine between the layer's output and the golden's stays above 0.99, so a comparison of outputs passes it.
"""

from __future__ import annotations

import port
import torch


class DecoderLayer(port.DecoderLayer):
    """The port, wrong in one line."""

    def convert_state_dict(self, tensors, config, layer_idx):
        """Put up rows before gate rows in layer 5."""
        state = super().convert_state_dict(tensors, config, layer_idx)
        if layer_idx == 5:
            gate, up = state["moe.gate_up_proj"].chunk(2, dim=1)
            state["moe.gate_up_proj"] = torch.cat((up, gate), dim=1)
        return state
