"""Stand-in for vllm_neuron/nn/embedding.py."""

from __future__ import annotations

import torch
from torch import nn


class VocabDimShardedEmbedding(nn.Module):
    """An embedding divided among ranks by tokens of the vocabulary; on one rank it is whole."""

    def __init__(self, vocab_size, embed_dim, dtype, tp_group):
        super().__init__()
        self.vocab_size_per_rank, self.tp_size = vocab_size, 1
        self.weight = nn.Parameter(torch.empty(vocab_size, embed_dim, dtype=dtype))

    def forward(self, input_ids, scatter_tokens, rank=None):
        return nn.functional.embedding(input_ids, self.weight)
