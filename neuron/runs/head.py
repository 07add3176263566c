"""The model outside its layers: embedding before them, final norm and lm_head after them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from minimax_tools.checkpoint.filling import Gathered
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EMBEDDING, FINAL_NORM, LM_HEAD
from neuron.builtin.layer import RMSNorm
from neuron.devices.runtime import Runtime
from neuron.devices.weights import Weight, WeightLoader


class DeviceHead(nn.Module):
    """Final norm and lm_head."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps).to(dtype)
        self.lm_head = torch.nn.utils.skip_init(
            nn.Linear, spec.hidden_size, spec.vocab_size, bias=False, dtype=dtype
        )

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B,S,H] to final_norm [B,S,H] and logits [B,S,vocab]."""
        normed = self.norm(hidden_states)
        return normed, self.lm_head(normed)


def embed_tokens(reader: CheckpointReader, input_ids: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """The embedding [B,S,H] of tokens [B,S], on the CPU; its weights are freed."""
    return nn.functional.embedding(input_ids, reader.read_weight(EMBEDDING, dtype))


def run_head(
    hidden_states: torch.Tensor,
    *,
    reader: CheckpointReader,
    spec: ModelSpec,
    runtime: Runtime,
    loader: WeightLoader,
    dtype: torch.dtype,
) -> Mapping[ModelSite, torch.Tensor]:
    """final_norm and logits of the last layer's output [B,S,H], computed on the device, given on the CPU.

    The weights are read straight to where they belong, and freed.
    """
    module = DeviceHead(spec, dtype=dtype)
    names = {
        "norm.weight": FINAL_NORM,
        "lm_head.weight": EMBEDDING if spec.tie_word_embeddings else LM_HEAD,
    }
    weights = {name: _stored(reader, stored) for name, stored in names.items()}
    loader.load(module, weights, what="the model's head")
    loader.release()
    with torch.no_grad():
        normed, logits = module(hidden_states.to(runtime.device, dtype))
    runtime.synchronise()
    return {ModelSite.FINAL_NORM: normed.to("cpu"), ModelSite.LOGITS: logits.to("cpu")}


def _stored(reader: CheckpointReader, name: str) -> Weight:
    return Gathered.whole(name, reader.index[name].shape, reader.read_weight_into)
