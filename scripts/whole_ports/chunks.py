"""Whole ports that are right in a prefill and in steps, and wrong where several tokens lie behind a cache.

B batch, S columns of a pass, P columns of the cache, K kv heads, D head_dim.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from model_port import Model


class _Chunked(Model):
    """The right port, whose attention and rotation can be changed in a pass of several tokens behind a cache."""

    def __init__(self, config):
        super().__init__(config)
        self.num_kv_heads = config.num_key_value_heads
        for layer in self.model.layers:
            attention = layer.self_attn
            attention.attend = self.changed_attend(attention.attend)
            attention.rotate = self.changed_rotate(attention.rotate)

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        self.is_chunk = past_key_values is not None and input_ids.shape[1] > 1
        return super().forward(input_ids, attention_mask, position_ids, past_key_values)

    def changed_attend(self, right):
        """Return attention: of queries [B,N,S,D], keys and values [B,K,P+S,D], and the mask [B,P+S]."""

        def attend(q, k, v, mask):
            return self.attend(right, q, k, v, mask) if self.is_chunk else right(q, k, v, mask)

        return attend

    def changed_rotate(self, right):
        """Return the rotation of heads [B,heads,S,D] by positions [B,S]."""

        def rotate(heads, position_ids):
            are_keys = heads.shape[1] == self.num_kv_heads
            return right(heads, self.positions(position_ids) if self.is_chunk and are_keys else position_ids)

        return rotate

    def attend(self, right, q, k, v, mask):
        """Return the attention of a chunk."""
        return right(q, k, v, mask)

    def positions(self, position_ids):
        """Return the positions [B,S] of a chunk's keys."""
        return position_ids


class PrefixHidden(_Chunked):
    """The mask of a chunk is causal over the chunk alone: the cached prefix is hidden."""

    def attend(self, right, q, k, v, mask):
        size = q.shape[2]
        return right(q, k[:, :, -size:], v[:, :, -size:], mask[:, -size:])


class MaskFromTheFirstKey(_Chunked):
    """The causal mask begins at the first key, as torch's does where there are more keys than queries."""

    def attend(self, right, q, k, v, mask):
        size = q.shape[2]
        return right(q, k[:, :, :size], v[:, :, :size], mask[:, :size])


class KeysEarly(_Chunked):
    """Keys of a chunk stand one position early."""

    def positions(self, position_ids):
        return position_ids - 1


class EdgeKeysEarly(_Chunked):
    """The first key of a chunk stands one position early."""

    def positions(self, position_ids):
        moved = position_ids.clone()
        moved[:, 0] -= 1
        return moved


class TakesNone(Model):
    """A right port that takes no pass of several tokens behind a cache, and says so."""

    takes_chunks = False
