"""BlockCache: the paged key-value cache of a model on vLLM Neuron, which vLLM's runner owns and the model fills.

The cache is a pool of blocks. A request's block table names its blocks in the order of its tokens; a token's slot is
its block times the block size, and its place in there. Padding is written to the null block, which belongs to nobody.
B requests, n blocks, b tokens of a block, W blocks of a table, K kv heads, P = W·b entries, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from minimax_tools.capture.passes import CachePair

# Number of the null block, and so also the slot of padding.
NULL_BLOCK = 0
# A block table's entry where a request has no block yet.
NO_BLOCK = -1
# Tokens of a block.
BLOCK_SIZE = 32
# Kernels of the plugin read a context of a multiple of this many tokens.
_CONTEXT_STEP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLayer:
    """A layer's part of the cache, as the model asks for it."""

    name: str  # the model's name for it, such as `layers.3.self_attn`
    num_kv_heads: int  # those of this rank
    head_size: int
    dtype: torch.dtype


class BlockCache:
    """The keys and values of all layers, [n,K,b,D] each, and the block tables of the running requests."""

    def __init__(self, layers: Sequence[CachedLayer], *, device: torch.device) -> None:
        self._layers = tuple(layers)
        self._device = device
        self._tables: list[list[int]] = []
        self._num_used = 1  # blocks taken so far; the null block is the first
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._hold(1)

    @property
    def tensors(self) -> Mapping[str, list[torch.Tensor]]:
        """Keys and values of each layer by its name; a new mapping whenever the pool has grown."""
        return self._tensors

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self._tables)

    def begin(self) -> None:
        """Forget all requests. What they wrote stays in the blocks, as on a server: the next ones take those again."""
        self._tables = []
        self._num_used = 1

    def add_request(self) -> int:
        """Add a request without tokens, and return its number."""
        self._tables.append([])
        return len(self._tables) - 1

    def slots(self, request: int, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of a request's tokens, int64 as `positions` [tokens]; blocks that it lacks are taken."""
        table = self._tables[request]
        while len(table) * BLOCK_SIZE <= int(positions.max()):
            table.append(self._num_used)
            self._num_used += 1
        self._hold(self._num_used)
        blocks = torch.tensor(table)[positions // BLOCK_SIZE]
        return blocks * BLOCK_SIZE + positions % BLOCK_SIZE

    def tables(self, requests: Sequence[int]) -> torch.Tensor:
        """Return the block tables of some requests, int32 [requests,W], all of one width."""
        width = self._table_width()
        rows = [self._tables[request] for request in requests]
        return torch.tensor([row + [NO_BLOCK] * (width - len(row)) for row in rows], dtype=torch.int32)

    def read(self) -> list[CachePair]:
        """Return keys and values [B,K,P,D] of each layer, in the order of the layers; an entry is a position."""
        return [
            (self._gather(keys), self._gather(values))
            for keys, values in (self._tensors[layer.name] for layer in self._layers)
        ]

    def _gather(self, pool: torch.Tensor) -> torch.Tensor:
        tables = self.tables(range(self.num_requests)).clamp(min=NULL_BLOCK).long()
        # [B,W,K,b,D] to [B,K,W·b,D]
        return pool[tables.to(pool.device)].transpose(1, 2).flatten(2, 3)

    def _table_width(self) -> int:
        blocks_of_step = _CONTEXT_STEP // BLOCK_SIZE
        longest = max(map(len, self._tables), default=1)
        return -(-longest // blocks_of_step) * blocks_of_step

    def _hold(self, num_blocks: int) -> None:
        """Enlarge the pool to at least so many blocks; the values in it stay."""
        held = next(iter(self._tensors.values()))[0].shape[0] if self._tensors else 0
        if num_blocks <= held:
            return
        grown = {}
        for layer in self._layers:
            # Twice the size, so that few steps of a run change the shapes that a device compiles for.
            shape = (max(num_blocks, 2 * held), layer.num_kv_heads, BLOCK_SIZE, layer.head_size)
            grown[layer.name] = [torch.zeros(shape, dtype=layer.dtype, device=self._device) for _ in range(2)]
            for new, old in zip(grown[layer.name], self._tensors.get(layer.name, ()), strict=False):
                new[:held] = old
        self._tensors = grown
