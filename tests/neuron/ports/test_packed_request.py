from __future__ import annotations

import pytest
import torch

from minimax_tools.errors import TargetError
from neuron.ports.packed_request import BLOCK_SIZE, BlockCache, CachedLayer, pack_prompt, pack_step

LAYER = CachedLayer(name="layers.0.self_attn", num_kv_heads=2, head_size=4, dtype=torch.bfloat16)


@pytest.fixture
def cache() -> BlockCache:
    return BlockCache([LAYER], device=torch.device("cpu"))


def test_a_prompt_is_padded_to_a_bucket_as_the_plugin_pads(cache: BlockCache) -> None:
    mask = torch.tensor([[1, 1, 1, 0]])
    request = pack_prompt(cache, torch.tensor([[7, 8, 9, 5]]), mask, torch.tensor([[0, 1, 2, 2]]))
    assert request.input_ids.dtype is torch.int32
    assert request.input_ids.tolist() == [7, 8, 9] + [0] * 125
    assert request.positions.tolist() == [0, 1, 2] + [2] * 125
    assert request.slots.tolist() == [BLOCK_SIZE, BLOCK_SIZE + 1, BLOCK_SIZE + 2] + [0] * 125
    assert request.sampled.tolist() == [0, 1, 2, 3]
    assert request.last_tokens.tolist() == [2]
    metadata = request.metadata(torch.device("cpu"))
    assert (metadata["max_query_len"], metadata["decode_token_threshold"]) == (128, 1)
    assert metadata["block_table_tensor"].tolist() == [[1, -1, -1, -1]]


def test_buckets_double(cache: BlockCache) -> None:
    tokens = torch.zeros(1, 129, dtype=torch.long)
    request = pack_prompt(cache, tokens, torch.ones_like(tokens), torch.arange(129)[None])
    assert request.input_ids.shape == (256,)


def test_a_step_takes_one_token_of_each_request(cache: BlockCache) -> None:
    for length in (3, BLOCK_SIZE):
        tokens = torch.zeros(1, length, dtype=torch.long)
        pack_prompt(cache, tokens, torch.ones_like(tokens), torch.arange(length)[None])
    request = pack_step(cache, torch.tensor([[4], [6]]), torch.tensor([[3], [BLOCK_SIZE]]))
    assert request.input_ids.tolist() == [4, 6]
    assert request.slots.tolist() == [BLOCK_SIZE + 3, 3 * BLOCK_SIZE]
    metadata = request.metadata(torch.device("cpu"))
    assert metadata["block_table_tensor"].tolist() == [[1, -1, -1, -1], [2, 3, -1, -1]]
    assert (metadata["max_query_len"], metadata["max_blocks_per_seq"]) == (1, 4)
    assert metadata["cached_seq_len"].tolist() == [[BLOCK_SIZE]]


def test_a_prompt_padded_before_its_tokens_is_refused(cache: BlockCache) -> None:
    with pytest.raises(TargetError, match="found 1 columns of padding before a prompt") as raised:
        pack_prompt(cache, torch.tensor([[5, 7]]), torch.tensor([[0, 1]]), torch.tensor([[0, 0]]))
    assert "Leave out --padding-side left" in str(raised.value)
