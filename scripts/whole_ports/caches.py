"""Whole ports that keep their cache themselves: right ones, and such with a mistake in it.

The cache has a fixed number of entries for each row of the batch. A token lies at its position, as in NxD Inference.
B batch, S columns of a pass, P entries of the cache, K kv heads, D head_dim.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from model_port import Model

# Entries of each row; one more takes what padding writes.
CAPACITY = 128
_LARGEST_FP8 = 448.0  # of float8_e4m3fn


class OwnCache(Model):
    """A right port with a cache of its own."""

    keeps_cache = True

    def forward(self, input_ids, attention_mask, position_ids):
        """Return the logits [B,S,vocab] of a prefill, or of a step if the mask [B,P+S] holds earlier columns."""
        is_prefill = attention_mask.shape[1] == input_ids.shape[1]
        if is_prefill:
            self.reset(len(input_ids), input_ids.device)
        states = self.model.embed_tokens(input_ids)
        is_real = attention_mask[:, -input_ids.shape[1] :].bool()
        for index, layer in enumerate(self.model.layers):
            past, mask = None, attention_mask
            if not is_prefill:
                past = self.read(index)
                mask = self.mask(position_ids)
            states, pair = layer(states, mask, self.positions(position_ids), past_key_value=past)
            self.write(index, pair, position_ids, is_real)
        return self.lm_head(self.model.norm(states))

    def reset(self, batch_size, device):
        """Empty the cache for new prompts."""
        config, dtype = self.model.layers[0].self_attn.config, self.lm_head.weight.dtype
        shape = (batch_size, config.num_key_value_heads, CAPACITY + 1, config.head_dim)
        self.cache = [
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)] for _ in self.model.layers
        ]

    def mask(self, position_ids):
        """Return the mask [B,P+1+1] of a step: entries before the token's own, and the token itself."""
        entries = torch.arange(CAPACITY + 1, device=position_ids.device)
        return torch.cat((entries < position_ids, torch.ones_like(position_ids).bool()), dim=1).long()

    def write(self, index, pair, position_ids, is_real):
        """Store the newest keys and values of a layer."""
        entries = torch.where(is_real, self.entries(position_ids), CAPACITY)
        buffers = self.cache[self.buffer_of(index)]
        for place, values in enumerate(pair):
            newest = self.store(values[:, :, -entries.shape[1] :])
            places = entries[:, None, :, None].expand_as(newest)
            buffers[place] = buffers[place].scatter(2, places, newest)

    def positions(self, position_ids):
        """Return the positions that keys and queries are rotated by."""
        return position_ids

    def entries(self, position_ids):
        """Return the entries [B,S] that tokens are written at."""
        return position_ids

    def buffer_of(self, index):
        """Return the number of the buffer that a layer uses."""
        return index

    def store(self, values):
        """Return values as the cache holds them."""
        return values

    def read(self, index):
        """Return the keys and values that attention of a layer reads, [B,K,P+1,D] each."""
        return tuple(self.cache[self.buffer_of(index)])

    def read_cache(self, past):
        """Return the cache for mm2: keys and values [B,K,P,D] by layer."""
        return [
            tuple(buffer[:, :, :CAPACITY] for buffer in self.cache[self.buffer_of(index)])
            for index in range(len(self.model.layers))
        ]


class CacheOneRowOff(OwnCache):
    """Steps write one entry behind their token's, so that the newest key is never read."""

    def entries(self, position_ids):
        return position_ids + int(position_ids.shape[1] == 1)


class CacheOneRowEarly(OwnCache):
    """Steps write one entry before their token's, over the key of the token before."""

    def entries(self, position_ids):
        return position_ids - int(position_ids.shape[1] == 1)


class CacheSharedByLayers(OwnCache):
    """Layers 1 and 2 write into one buffer: an alias that a compiled graph made of two equal ones."""

    def buffer_of(self, index):
        return 2 if index == 1 else index


class CacheFp8WithoutScale(OwnCache):
    """The cache is in FP8 e4m3, and its scales were left out."""

    def store(self, values):
        in_range = values.float().clamp(-_LARGEST_FP8, _LARGEST_FP8)
        return in_range.to(torch.float8_e4m3fn).to(values.dtype)


class CacheHeadsExchanged(OwnCache):
    """Steps write the kv heads in the reverse order."""

    def store(self, values):
        return values.flip(1) if values.shape[2] == 1 else values


class CacheFp8E5m2(OwnCache):
    """The cache is in FP8 e5m2, which has no scales and two bits of mantissa."""

    def store(self, values):
        return values.to(torch.float8_e5m2).to(values.dtype)


class PositionsRestartedAtDecode(OwnCache):
    """Steps are rotated by the column of their own pass, 0, and written where they belong."""

    def positions(self, position_ids):
        return torch.zeros_like(position_ids) if position_ids.shape[1] == 1 else position_ids


class PositionsOffAtDecode(OwnCache):
    """Steps are rotated by the position behind their own: the length was counted with the new token."""

    def positions(self, position_ids):
        return position_ids + int(position_ids.shape[1] == 1)


class CacheBehindMask(OwnCache):
    """The mask of a step ends one entry early: the newest cached key is hidden."""

    def mask(self, position_ids):
        return super().mask(position_ids - 1)


class CacheStale(Model):
    """The cache is not emptied between prompts: new ones attend to those before."""

    keeps_cache = True
    empties = False
    past = None

    def forward(self, input_ids, attention_mask, position_ids):
        """Return the logits [B,S,vocab]; the mask is [B,P+S]."""
        if self.empties and attention_mask.shape[1] == input_ids.shape[1]:
            self.past = None
        if self.past is not None:
            num_missing = self.past[0][0].shape[2] + input_ids.shape[1] - attention_mask.shape[1]
            attention_mask = torch.nn.functional.pad(attention_mask, (num_missing, 0), value=1)
        logits, self.past = super().forward(input_ids, attention_mask, position_ids, self.past)
        return logits

    def read_cache(self, past):
        """Return the cache for mm2."""
        return self.past


class CacheEmptied(CacheStale):
    """A right port: its growing cache is emptied before each prefill."""

    empties = True


class CacheFp8WithScales(OwnCache):
    """A right port with an FP8 cache: one scale for each token and head."""

    def store(self, values):
        scale = values.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / _LARGEST_FP8
        return ((values.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


class CacheFp8BehindMask(CacheFp8WithScales):
    """The cache is in FP8 with scales, which is right, and the mask of a step ends one entry early."""

    def mask(self, position_ids):
        return super().mask(position_ids - 1)


class CacheEightTokens(OwnCache):
    """In row 1, eight tokens hold the keys and values of those before them."""

    def write(self, index, pair, position_ids, is_real):
        super().write(index, pair, position_ids, is_real)
        if position_ids.shape[1] > 1:
            for buffer in self.cache[index]:
                buffer[1, :, 8:16] = buffer[1, :, :8]


class CachePageShared(OwnCache):
    """Two rows share a page: row 0's second eight tokens lie on row 1's first."""

    def write(self, index, pair, position_ids, is_real):
        super().write(index, pair, position_ids, is_real)
        if position_ids.shape[1] > 1:
            for buffer in self.cache[index]:
                buffer[1, :, :8] = buffer[0, :, 8:16]


class CacheForgets(OwnCache):
    """A right port of prompts and steps: it takes each pass of several tokens for new prompts."""

    def forward(self, input_ids, attention_mask, position_ids):
        if input_ids.shape[1] > 1:
            attention_mask = attention_mask[:, -input_ids.shape[1] :]
        return super().forward(input_ids, attention_mask, position_ids)


class CacheOtherLayout(OwnCache):
    """A right port that shows its cache as [B,P,K·D], which mm2 does not know."""

    def read_cache(self, past):
        return [
            tuple(tensor.transpose(1, 2).flatten(2) for tensor in pair) for pair in super().read_cache(past)
        ]


class CacheTransposed(OwnCache):
    """A right port that shows its cache as [B,P,K,D]."""

    def read_cache(self, past):
        return [tuple(tensor.transpose(1, 2) for tensor in pair) for pair in super().read_cache(past)]


class CacheHidden(OwnCache):
    """A right port that does not show its cache."""

    read_cache = None


class CacheHiddenOneRowOff(CacheOneRowOff):
    """Steps write one entry behind their token's, in a cache that mm2 cannot read."""

    read_cache = None


class CacheHiddenShared(CacheSharedByLayers):
    """Layers 1 and 2 write into one buffer that mm2 cannot read."""

    read_cache = None


class KeysBeforeRope(OwnCache):
    """A right port that caches keys before they are rotated, and rotates them when it reads them."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.rotate = _Rotation(layer.self_attn.rotate)

    def write(self, index, pair, position_ids, is_real):
        keys = self.model.layers[index].self_attn.rotate.before
        super().write(index, (keys, pair[1]), position_ids, is_real)

    def read(self, index):
        keys, values = super().read(index)
        entries = torch.arange(CAPACITY + 1, device=keys.device).expand(len(keys), -1)
        return self.model.layers[index].self_attn.rotate(keys, entries), values


class _Rotation:
    """Rotary embedding that keeps what it rotated last; of queries and keys these are the keys."""

    def __init__(self, rotate):
        self.rotate = rotate
        self.before = None

    def __call__(self, heads, position_ids):
        self.before = heads
        return self.rotate(heads, position_ids)
