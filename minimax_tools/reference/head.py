"""Float32Head: final norm and lm_head in float32, read and multiplied a slab of the vocabulary at a time."""

from __future__ import annotations

import torch

from minimax_tools.checkpoint.names import EMBEDDING, FINAL_NORM, LM_HEAD
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.sites import ModelSite
from minimax_tools.spec import ModelSpec

_SLAB_ROWS = 16384


class Float32Head:
    """The model's head in float32.

    Args:
        reader: The checkpoint.
        spec: Its quantities.
        dtype: Dtype that the reference holds the weights in; they are rounded to it, then upcast.
    """

    def __init__(self, reader: CheckpointReader, spec: ModelSpec, *, dtype: torch.dtype) -> None:
        self._spec = spec
        self._dtype = dtype
        self._norm = reader.read_weight(FINAL_NORM, dtype)
        self._lm_head = reader.read_weight(EMBEDDING if spec.tie_word_embeddings else LM_HEAD, dtype)

    def run(self, hidden_states: torch.Tensor) -> dict[ModelSite, torch.Tensor]:
        """final_norm [B,S,H] and logits [B,S,vocab], float32, of the last layer's output [B,S,H]."""
        states = hidden_states.to(torch.float32)
        variance = states.square().mean(dim=-1, keepdim=True)
        normed = states * torch.rsqrt(variance + self._spec.rms_norm_eps) * self._norm.to(torch.float32)
        slabs = [normed @ slab.to(torch.float32).T for slab in self._lm_head.split(_SLAB_ROWS)]
        return {ModelSite.FINAL_NORM: normed, ModelSite.LOGITS: torch.cat(slabs, dim=-1)}
