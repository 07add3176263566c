from __future__ import annotations

import torch

from neuron.ports.packed_request import BLOCK_SIZE, NO_BLOCK, BlockCache, CachedLayer

LAYER = CachedLayer(name="layers.0.self_attn", num_kv_heads=2, head_size=4, dtype=torch.bfloat16)


def new_cache() -> BlockCache:
    return BlockCache([LAYER], device=torch.device("cpu"))


def write(cache: BlockCache, request: int, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write keys [tokens,K,D] as a model does, and their negatives as values."""
    slots = cache.slots(request, positions)
    for pool, new in zip(cache.tensors[LAYER.name], (values, -values), strict=True):
        pool[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = new


def test_what_requests_write_is_read_back_at_its_positions() -> None:
    cache = new_cache()
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


def test_a_new_batch_takes_the_old_blocks_with_what_is_in_them() -> None:
    cache = new_cache()
    write(cache, cache.add_request(), torch.arange(3), torch.ones(3, 2, 4).bfloat16())
    cache.begin()
    assert cache.num_requests == 0
    write(cache, cache.add_request(), torch.arange(1), torch.full((1, 2, 4), 5.0).bfloat16())
    ((keys, _),) = cache.read()
    assert keys[0, 0, :4, 0].tolist() == [5, 1, 1, 0]


def test_no_request_has_the_null_block_and_a_pool_that_grew_is_a_new_mapping() -> None:
    cache = new_cache()
    before = cache.tensors
    slots = cache.slots(cache.add_request(), torch.arange(BLOCK_SIZE * 3))
    assert slots.min() >= BLOCK_SIZE
    assert cache.tensors is not before
    grown = cache.tensors
    cache.slots(0, torch.tensor([0]))
    assert cache.tensors is grown


def test_a_context_is_a_multiple_of_what_kernels_read() -> None:
    cache = new_cache()
    cache.slots(cache.add_request(), torch.tensor([128]))
    assert cache.tables([0]).shape[1] * BLOCK_SIZE == 256
