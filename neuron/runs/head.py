"""The model outside its layers: embedding, final norm and lm_head.

B batch, S sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from minimax_tools.checkpoint.filling import Gathered
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EMBEDDING, FINAL_NORM, head_name
from neuron.builtin.layer import RMSNorm, UndrawnLinear
from neuron.devices.weights import Weight
from neuron.runs.executor import LayerExecutor


class DeviceHead(nn.Module):
    """Final norm and lm_head."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps).to(dtype)
        self.lm_head = UndrawnLinear(spec.hidden_size, spec.vocab_size, dtype=dtype)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute final_norm [B,S,H] and logits [B,S,vocab], in the weights' dtype, from [B,S,H] of any dtype."""
        normed = self.norm(hidden_states).to(self.lm_head.weight.dtype)
        return normed, self.lm_head(normed)


def embed_tokens(reader: CheckpointReader, input_ids: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Compute the embedding [B,S,H] of tokens [B,S] on the CPU; its weights are freed at return."""
    return nn.functional.embedding(input_ids, reader.read_weight(EMBEDDING, dtype))


def run_head(hidden_states: torch.Tensor, *, executor: LayerExecutor) -> Mapping[ModelSite, torch.Tensor]:
    """Compute final_norm [B,S,H] and logits [B,S,vocab] from the last layer's output [B,S,H].

    The device computes; both are returned on the CPU. The weights are freed at return.
    """
    spec, dtype = executor.setup.spec, executor.setup.dtype
    reader, runtime, loader = executor.reader, executor.runtime, executor.loader
    module = DeviceHead(spec, dtype=dtype)
    names = {"norm.weight": FINAL_NORM, "lm_head.weight": head_name(spec)}
    weights: dict[str, Weight] = {
        name: Gathered.whole(stored, reader.index[stored].shape, reader.read_weight_into)
        for name, stored in names.items()
    }
    loader.load(module, weights, what="the model's head")
    loader.release()  # frees the host's buffers: no further module is loaded
    with torch.no_grad():
        # A port's float32 is not rounded before the norm: the noise of logits has no such rounding.
        read_in = torch.promote_types(hidden_states.dtype, dtype)
        normed, logits = module(hidden_states.to(runtime.device, read_in))
    runtime.synchronise()
    return {ModelSite.FINAL_NORM: normed.to("cpu"), ModelSite.LOGITS: logits.to("cpu")}
