"""A whole port: from token ids to logits, with a cache for decoding.

Its layers are those of `cached_port.py`, which name their sites; mm2 finds the embedding, the final norm and the list
of layers by the usual names. Judge it with:

    mm2-test model --model DIR --golden DIR --target scripts/examples/model_port.py:Model

B batch, S columns of a pass, P columns of the cache, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from cached_port import DecoderLayer
from port import Norm


class Body(nn.Module):
    """Embedding, layers and final norm, named as on the hub."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Model(nn.Module):
    """The port; called as Model(config)."""

    def __init__(self, config):
        super().__init__()
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def convert_state_dict(self, tensors, config, layer_idx):
        """Convert one layer's tensors, or, for `layer_idx` None, leave the others as they are."""
        if layer_idx is None:
            return tensors
        converted = self.model.layers[layer_idx].convert_state_dict(tensors, config, layer_idx)
        return {f"model.layers.{layer_idx}.{name}": tensor for name, tensor in converted.items()}

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        """Return logits [B,S,vocab] and the cache: keys and values [B,K,P+S,D] of each layer.

        `input_ids` and `position_ids` are [B,S], `attention_mask` is [B,P+S] of 0 and 1, the cache's columns first.
        """
        states = self.model.embed_tokens(input_ids)
        cache = []
        for index, layer in enumerate(self.model.layers):
            past = None if past_key_values is None else past_key_values[index]
            states, key_value = layer(states, attention_mask, position_ids, past_key_value=past)
            cache.append(key_value)
        return self.lm_head(self.model.norm(states)), cache
