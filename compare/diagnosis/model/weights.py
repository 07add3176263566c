"""ModelWeights: the checkpoint's tensors outside the layers, and the layers' norms that may stand in for the final one.

Values are rounded to `dtype`, the golden's. V the vocabulary, H hidden.
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
    """Embedding, final norm, head, and norms of the layers; each is read once, when it is first asked for."""

    def __init__(self, reader: CheckpointReader, spec: ModelSpec, *, dtype: torch.dtype) -> None:
        self._reader = reader
        self._spec = spec
        self._dtype = dtype

    @cached_property
    def embedding(self) -> torch.Tensor:
        """The embedding, [V,H] in the golden's dtype; users make rows float32, since the table is large."""
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
    def final_norm(self) -> torch.Tensor:
        """Weight of the final norm, [H]: float32, in which predictions are computed."""
        return self._reader.read_weight(weight_names.FINAL_NORM, self._dtype).float()

    @cached_property
    def layer_norms(self) -> Mapping[str, torch.Tensor]:
        """Weights of the norms before attention and experts, float32 [H], by names such as `2.input_layernorm`.

        A port may load one of them as its final norm. A folder with a slice of the model lacks the other layers' norms.
        """
        weights = {}
        for layer in range(self._spec.num_hidden_layers):
            for name in _LAYER_NORMS:
                hub_name = weight_names.layer_prefix(layer) + name
                if hub_name in self._reader.index.entries:
                    short_name = f"{layer}.{name.removesuffix('.weight')}"
                    weights[short_name] = self._reader.read_weight(hub_name, self._dtype).float()
        return weights
