"""Stand-in for vllm_neuron/nn/embedding.py."""

from __future__ import annotations

import torch
from torch import nn


class VocabDimShardedEmbedding(nn.Module):
    """An embedding, here whole on every rank; the plugin divides it. In a prefill a rank returns its tokens only."""

    def __init__(self, vocab_size, embed_dim, dtype, tp_group):
        super().__init__()
        self.vocab_size_per_rank, self.tp_size, self.tp_group = vocab_size, 1, tp_group
        self.weight = nn.Parameter(torch.empty(vocab_size, embed_dim, dtype=dtype))

    def forward(self, input_ids, scatter_tokens, rank=None):
        states = nn.functional.embedding(input_ids, self.weight)
        num_ranks = self.tp_group.size()
        return states.chunk(num_ranks)[int(rank)] if scatter_tokens else states
