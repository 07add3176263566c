"""Passes as vLLM Neuron's runner packs them: tokens, the paged cache, and the ranks' parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minimax_tools.errors import TargetError
from neuron.devices.ranks import Ranks
from neuron.ports.packed_request import (
    BLOCK_SIZE,
    NO_BLOCK,
    BlockCache,
    DividedTokens,
    PackedRequest,
    pack_prompt,
    pack_step,
    refuse_uneven,
)

LAYER = SimpleNamespace(name="layers.0.self_attn", num_kv_heads=2, head_size=4, dtype=torch.bfloat16)


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


def pack_zeros(cache: BlockCache, num_tokens: int) -> PackedRequest:
    tokens = torch.zeros(1, num_tokens, dtype=torch.long)
    return pack_prompt(cache, tokens, torch.ones_like(tokens), torch.arange(num_tokens)[None])


def test_buckets_double(cache: BlockCache) -> None:
    assert pack_zeros(cache, 129).input_ids.shape == (256,)


def test_a_step_takes_one_token_of_each_request(cache: BlockCache) -> None:
    for length in (3, BLOCK_SIZE):
        pack_zeros(cache, length)
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


def write(cache: BlockCache, request: int, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write keys [tokens,K,D] as a model does, and their negatives as values."""
    slots = cache.slots(request, positions)
    for pool, new in zip(cache.tensors[LAYER.name], (values, -values), strict=True):
        pool[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = new


def test_what_requests_write_is_read_back_at_its_positions(cache: BlockCache) -> None:
    written = torch.randn(2, BLOCK_SIZE + 3, 2, 4).bfloat16()
    for request in (cache.add_request(), cache.add_request()):
        write(cache, request, torch.arange(BLOCK_SIZE), written[request, :BLOCK_SIZE])
    # Steps, in which each request takes a further block: its blocks are not neighbours.
    for position in range(BLOCK_SIZE, BLOCK_SIZE + 3):
        for request in (0, 1):
            write(cache, request, torch.tensor([position]), written[request, position : position + 1])
    assert cache.tables((0, 1))[:, :3].tolist() == [[1, 3, NO_BLOCK], [2, 4, NO_BLOCK]]
    ((keys, values),) = cache.read()
    read = keys[:, :, : BLOCK_SIZE + 3].transpose(1, 2)
    assert torch.equal(read, written)
    assert torch.equal(values[:, :, : BLOCK_SIZE + 3].transpose(1, 2), -written)


def test_a_new_batch_takes_the_old_blocks_with_what_is_in_them(cache: BlockCache) -> None:
    write(cache, cache.add_request(), torch.arange(3), torch.ones(3, 2, 4).bfloat16())
    cache.begin()
    assert cache.num_requests == 0
    write(cache, cache.add_request(), torch.arange(1), torch.full((1, 2, 4), 5.0).bfloat16())
    ((keys, _),) = cache.read()
    assert keys[0, 0, :4, 0].tolist() == [5, 1, 1, 0]


def test_no_request_has_the_null_block_and_a_pool_that_grew_is_a_new_mapping(cache: BlockCache) -> None:
    before = cache.tensors
    slots = cache.slots(cache.add_request(), torch.arange(BLOCK_SIZE * 3))
    assert slots.min() >= BLOCK_SIZE
    assert cache.tensors is not before
    grown = cache.tensors
    cache.slots(0, torch.tensor([0]))
    assert cache.tensors is grown


def test_a_context_is_a_multiple_of_what_kernels_read(cache: BlockCache) -> None:
    cache.slots(cache.add_request(), torch.tensor([128]))
    assert cache.tables([0]).shape[1] * BLOCK_SIZE == 256


def test_a_single_rank_has_all_tokens() -> None:
    tokens, states = DividedTokens(Ranks()), torch.randn(1, 3, 4)
    assert tokens.cut(states) is states
    assert tokens.join(states) is states


def test_ranks_that_do_not_divide_a_bucket_are_refused() -> None:
    refuse_uneven(Ranks(degree=8))
    with pytest.raises(TargetError, match="3 ranks do not divide a prefill of 128 tokens"):
        refuse_uneven(Ranks(degree=3))
