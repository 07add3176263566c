"""Right whole ports of other make: transformers' own model, compiled ones, a black box, and one of several ranks.

B batch, S columns of a pass, P columns of the cache, K kv heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))

import cached_port
import caches
import chunks
import family_ports
import passes
import port
import tensor_parallel_port
from model_port import Model
from torch.func import functional_call
from transformers import StaticCache


class TransformersSdpa(family_ports.Model):
    """transformers' own model, with its DynamicCache."""

    def new_cache(self):
        """Return what a prefill is given as past; None for transformers' choice."""
        return None  # noqa: RET501 - others return one

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        """Return transformers' output: logits [B,S,V] and the cache."""
        # The past goes by its place: its name is `past_key_values` up to transformers 5.23, and `cache` since.
        past = self.new_cache() if past_key_values is None else past_key_values
        return super().forward(input_ids, attention_mask, position_ids, past)


class TransformersEager(TransformersSdpa):
    """transformers' own model with eager attention and eager experts."""

    attn_implementation = "eager"
    experts_implementation = "eager"


class TransformersBatched(TransformersSdpa):
    """transformers' own model with eager attention and batched experts."""

    attn_implementation = "eager"
    experts_implementation = "batched_mm"


class TransformersStaticCache(TransformersSdpa):
    """transformers' own model with a cache of fixed length."""

    def new_cache(self):
        return StaticCache(config=self.whole.config, max_cache_len=64)


def compiled_eager(config):
    """Build the example port behind torch.compile's graphs, run as they are."""
    return torch.compile(Model(config), backend="eager")


def compiled_aot_eager(config):
    """Build the example port behind torch.compile's graphs, traced by AOTAutograd."""
    return torch.compile(Model(config), backend="aot_eager")


class _WithTuples(Model):
    """The example port, whose cache is what torch can trace: tuples."""

    def forward(self, *inputs):
        logits, cache = super().forward(*inputs)
        return logits, tuple(cache)


class _BlackBox(nn.Module):
    """A port that shows no submodule: it holds the weights of `inner`, but not the module."""

    inner = Model

    def __init__(self, config):
        super().__init__()
        whole = self.inner(config)
        for name, parameter in whole.named_parameters():
            self.register_parameter(name.replace(".", "__"), parameter)
        kept = whole.state_dict().keys()
        for name, buffer in whole.named_buffers():
            self.register_buffer(name.replace(".", "__"), buffer, persistent=name in kept)
        self.hidden = (whole,)

    def convert_state_dict(self, tensors, config, layer_idx):
        """Convert as the port within does."""
        converted = self.hidden[0].convert_state_dict(tensors, config, layer_idx)
        return {name.replace(".", "__"): converted[name] for name in converted}

    def run(self, *inputs):
        """Call the port within on this module's own weights, which may have been moved."""
        named = (*self.named_parameters(), *self.named_buffers())
        return functional_call(
            self.hidden[0], {name.replace("__", "."): tensor for name, tensor in named}, inputs
        )


class _OwnCacheBox(_BlackBox):
    inner = caches.OwnCache
    keeps_cache = True

    def forward(self, input_ids, attention_mask, position_ids):
        return self.run(input_ids, attention_mask, position_ids)


class BlackBox(_BlackBox):
    """A right port that shows nothing."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        return self.run(input_ids, attention_mask, position_ids, past_key_values)


class TransformersBlackBox(BlackBox):
    """transformers' own model, of which nothing is seen but logits and cache."""

    inner = TransformersSdpa

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        """Return logits [B,S,V] and transformers' cache."""
        result = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        return result.logits, result.past_key_values


class TransformersEagerBlackBox(TransformersBlackBox):
    """The same with eager attention and eager experts."""

    inner = TransformersEager


class TransformersBatchedBlackBox(TransformersBlackBox):
    """The same with eager attention and batched experts."""

    inner = TransformersBatched


class TracedBlackBox(BlackBox):
    """A black box that torch traced, a graph for each shape."""

    inner = _WithTuples

    def __init__(self, config):
        super().__init__(config)
        self.graphs = {}

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        """Return logits [B,S,V] and the cache, a pair [B,K,P+S,D] for each layer."""
        inputs = (input_ids, attention_mask, position_ids)
        if past_key_values is not None:
            inputs = (*inputs, tuple(map(tuple, past_key_values)))
        shape = (*input_ids.shape, attention_mask.shape[1])
        if shape not in self.graphs:
            self.graphs[shape] = torch.jit.trace(
                self.hidden[0].requires_grad_(False), inputs, check_trace=False
            )
        return self.graphs[shape](*inputs)


class BlackBoxPrefixHidden(BlackBox):
    """A chunk hides the cached prefix, and nothing is shown."""

    inner = chunks.PrefixHidden


class BlackBoxEightTokens(_OwnCacheBox):
    """Eight tokens of row 1 hold others' keys and values, and nothing is shown."""

    inner = caches.CacheEightTokens


class BlackBoxPageShared(_OwnCacheBox):
    """Two rows share a page of the cache, and nothing is shown."""

    inner = caches.CachePageShared


class BlackBoxAnglesByShape(BlackBox):
    """Positions are kept by the shape of a prefill, and nothing is shown."""

    inner = passes.AnglesByShape


class RankAttention(tensor_parallel_port.Attention):
    """Attention with the rank's heads, and a cache of them."""

    attend = cached_port.Attention.attend

    def forward(self, states, attention_mask, position_ids, past_key_value=None):
        """Return the output [B,S,H], the same on all ranks, and the rank's keys and values [B,K,P+S,D]."""
        partial, pair = cached_port.Attention.forward(
            self, states, attention_mask, position_ids, past_key_value
        )
        return tensor_parallel_port.sum_over_ranks(partial, states.dtype), pair


class RankLayer(tensor_parallel_port.DecoderLayer):
    """The layer's part of a rank, with a cache."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = RankAttention(config)
        self.sites = {**self.sites, "attn_delta": "self_attn:output[0]@replicate"}

    forward = cached_port.DecoderLayer.forward


class TensorParallel(nn.Module):
    """A right port of several ranks: layers, embedding and head are divided among them."""

    def __init__(self, config):
        super().__init__()
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.num_rows = config.vocab_size // self.num_ranks
        self.embed_tokens = RankEmbedding(config)
        self.layers = nn.ModuleList(RankLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = port.Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, self.num_rows, bias=False)

    def convert_state_dict(self, tensors, config, layer_idx):
        """Cut the rank's part of each tensor."""
        if layer_idx is not None:
            converted = self.layers[layer_idx].convert_state_dict(tensors, config, layer_idx)
            return {f"layers.{layer_idx}.{name}": tensor for name, tensor in converted.items()}
        return {
            "embed_tokens.weight": tensors["model.embed_tokens.weight"].chunk(self.num_ranks)[self.rank],
            "norm.weight": tensors["model.norm.weight"],
            "lm_head.weight": tensors["lm_head.weight"].chunk(self.num_ranks)[self.rank],
        }

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        """Return logits [B,S,V], the same on all ranks, and the rank's cache."""
        states = self.embed_tokens(input_ids)
        cache = []
        for index, layer in enumerate(self.layers):
            past = None if past_key_values is None else past_key_values[index]
            states, pair = layer(states, attention_mask, position_ids, past_key_value=past)
            cache.append(pair)
        return self.gather(self.lm_head(self.norm(states))), cache

    def gather(self, logits):
        """Join the ranks' logits [B,S,V/ranks] in the order of ranks."""
        return torch.cat(self.parts(logits), dim=-1)

    def parts(self, logits):
        """Return the logits of each rank, in the order of ranks."""
        parts = [torch.empty_like(logits) for _ in range(self.num_ranks)]
        dist.all_gather(parts, logits.contiguous())
        return parts


class TensorParallelShardsExchanged(TensorParallel):
    """The ranks' logits are joined in the reverse order."""

    def gather(self, logits):
        return torch.cat(self.parts(logits)[::-1], dim=-1)


class RankEmbedding(nn.Module):
    """The rank's rows of the embedding; tokens of other ranks are zero, and a sum over ranks fills them."""

    def __init__(self, config):
        super().__init__()
        self.num_rows = config.vocab_size // dist.get_world_size()
        self.first = dist.get_rank() * self.num_rows
        self.weight = nn.Parameter(torch.empty(self.num_rows, config.hidden_size))

    def forward(self, input_ids):
        """Map token ids [B,S] to [B,S,H], the same on all ranks."""
        rows = input_ids - self.first
        is_own = (rows >= 0) & (rows < self.num_rows)
        states = self.weight[rows.clamp(0, self.num_rows - 1)] * is_own[..., None]
        return tensor_parallel_port.sum_over_ranks(states, states.dtype)
