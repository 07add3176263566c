"""Whole ports with a mistake in the embedding, the final norm or the head; V vocabulary, H hidden."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from model_port import Model

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Ranks that the planted mistakes of vocabulary shards stand for.
NUM_SHARDS = 4


class _OtherWeights(Model):
    """The right port with another tensor outside the layers."""

    def convert_state_dict(self, tensors, config, layer_idx):
        """Convert as the right port does, then change what lies outside the layers."""
        converted = super().convert_state_dict(tensors, config, layer_idx)
        if layer_idx is not None:
            return converted
        outer = {name: converted[name] for name in (EMBEDDING, FINAL_NORM, HEAD)}
        return outer | self.edit(outer)

    def edit(self, outer):
        """Return the changed tensors by name."""
        raise NotImplementedError


class HeadTied(_OtherWeights):
    """The head is tied to the embedding: a default of `tie_word_embeddings` that the config does not override."""

    def edit(self, outer):
        return {HEAD: outer[EMBEDDING]}


class HeadTransposed(_OtherWeights):
    """The head's memory [V,H] is read as [H,V], by a reshape where a transpose was meant."""

    def edit(self, outer):
        vocab_size, hidden_size = outer[HEAD].shape
        return {HEAD: outer[HEAD].reshape(hidden_size, vocab_size).T.contiguous()}


class HeadRowsExchanged(_OtherWeights):
    """Neighbouring rows of the head are exchanged."""

    def edit(self, outer):
        return {HEAD: outer[HEAD].unflatten(0, (-1, 2)).flip(1).flatten(0, 1)}


class VocabularyShardsExchanged(_OtherWeights):
    """The shards of the head's rows are gathered in the reverse order of ranks."""

    def edit(self, outer):
        return {HEAD: torch.cat(outer[HEAD].chunk(NUM_SHARDS)[::-1])}


class VocabularyOfRank0(_OtherWeights):
    """The rows of rank 0 are held by all ranks."""

    def edit(self, outer):
        return {HEAD: outer[HEAD].chunk(NUM_SHARDS)[0].repeat(NUM_SHARDS, 1)}


class EmbeddingLowPrecision(_OtherWeights):
    """The embedding is held in FP8 without scales."""

    def edit(self, outer):
        return {EMBEDDING: outer[EMBEDDING].to(torch.float8_e4m3fn).to(outer[EMBEDDING].dtype)}


class EmbeddingOfEightBits(_OtherWeights):
    """The embedding is held in eight bits with a scale for each row, and shown in float32."""

    sites = {"embedding": "shown"}

    def __init__(self, config):
        super().__init__(config)
        self.shown = nn.Identity()
        self.model.embed_tokens.register_forward_hook(
            lambda _, __, states: (self.shown(states.float()), None)[1]
        )

    def edit(self, outer):
        table = outer[EMBEDDING].float()
        scale = table.abs().amax(-1, keepdim=True) / 127
        return {EMBEDDING: ((table / scale).round() * scale).to(outer[EMBEDDING].dtype)}


class _Scaled(nn.Embedding):
    def forward(self, input_ids):
        return super().forward(input_ids) * self.embedding_dim**0.5


class EmbeddingScaled(Model):
    """The embedding is multiplied by √H, as in Gemma."""

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = _Scaled(config.vocab_size, config.hidden_size)


class FinalNormMissing(Model):
    """The head reads the last layer's output."""

    def convert_state_dict(self, tensors, config, layer_idx):
        converted = super().convert_state_dict(tensors, config, layer_idx)
        return converted if layer_idx is not None else {name: converted[name] for name in (EMBEDDING, HEAD)}

    def __init__(self, config):
        super().__init__(config)
        self.model.norm = nn.Identity()


class FinalNormPlusOne(_OtherWeights):
    """The final norm multiplies by 1 + weight."""

    def edit(self, outer):
        return {FINAL_NORM: outer[FINAL_NORM] + 1}


class FinalNormOfALayer(Model):
    """The final norm has the weight of a layer's first norm: a name that ends alike was taken."""

    def convert_state_dict(self, tensors, config):
        """Convert the whole model at once."""
        converted = {name: tensors[name] for name in (EMBEDDING, HEAD)}
        converted[FINAL_NORM] = tensors["model.layers.1.input_layernorm.weight"]
        for index, layer in enumerate(self.model.layers):
            prefix = f"model.layers.{index}."
            own = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
            for name, tensor in layer.convert_state_dict(own, config, index).items():
                converted[prefix + name] = tensor
        return converted


class _Padded(Model):
    """A head with more rows than the vocabulary has, as ranks need that divide it evenly."""

    num_padded = 16
    filling = -1e4  # logit of a row that no token has

    def forward(self, *inputs, **named):
        """Return logits [B,S,V+padding]."""
        logits, *rest = super().forward(*inputs, **named)
        filled = self.fill(logits[..., : self.num_padded])
        return torch.cat((logits, filled), dim=-1), *rest

    def fill(self, logits):
        """Return the logits of the padding."""
        return torch.full_like(logits, self.filling)


class PaddedLogitsLive(_Padded):
    """The padding's rows hold what was in memory: their logits may be the largest."""

    def fill(self, logits):
        return 3.0 * logits.abs() + 1.0


class PaddedLogitsMasked(_Padded):
    """A right port whose vocabulary is padded, and the padding's logits masked."""
