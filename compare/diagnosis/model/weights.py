"""ModelWeights: the checkpoint's tensors outside the layers, as the golden computes with them.

V the vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model import weight_names
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import head_name

_LAYER_NORMS = (weight_names.INPUT_NORM, weight_names.POST_NORM)


class ModelWeights:
    """Embedding, final norm and head; each is read once, when it is first asked for.

    Args:
        reader: Reader of the checkpoint.
        spec: Quantities of the model.
        dtype: Dtype that the golden computes in; values are rounded to it.
    """

    def __init__(self, reader: CheckpointReader, spec: ModelSpec, *, dtype: torch.dtype) -> None:
        self._reader = reader
        self._spec = spec
        self._dtype = dtype

    @cached_property
    def embedding(self) -> torch.Tensor:
        """The embedding, [V,H] in the golden's dtype."""
        return self._reader.read_weight(weight_names.EMBEDDING, self._dtype)

    @cached_property
    def head(self) -> torch.Tensor:
        """The head, [V,H] in the golden's dtype; the embedding if the two are tied."""
        return (
            self._reader.read_weight(head_name(self._spec), self._dtype) if self.has_head else self.embedding
        )

    @property
    def has_head(self) -> bool:
        """True if the head is not tied to the embedding."""
        return not self._spec.tie_word_embeddings

    @cached_property
    def norm(self) -> torch.Tensor:
        """Weight of the final norm, float32 [H]."""
        return self._reader.read_weight(weight_names.FINAL_NORM, self._dtype).float()

    @cached_property
    def layer_norms(self) -> Mapping[str, torch.Tensor]:
        """Weights, float32 [H], of the block norms that the folder holds, by names such as `2.input_layernorm`."""
        return {
            f"{layer}.{name.split('.')[0]}": self._reader.read_weight(full, self._dtype).float()
            for layer in range(self._spec.num_hidden_layers)
            for name in _LAYER_NORMS
            if (full := weight_names.layer_prefix(layer) + name) in self._reader.index.entries
        }
