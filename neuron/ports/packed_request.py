"""The tokens of a pass as vLLM Neuron's runner packs them, its paged key-value cache, and the ranks' parts of them.

Tokens lie in one dimension without a batch. A prefill takes one prompt, padded to a bucket; a decoding step takes one
token of each request. The cache is a pool of blocks: a request's block table names its blocks in the order of its
tokens, and a token's slot is its block times the block size, and its place in there. Padding is written to the null
block, which belongs to nobody. Models divide the tokens of a prefill among the ranks between attentions.
B requests, S columns of a prompt, T tokens of a pass, n blocks, b tokens of a block, W blocks of a table, K kv heads,
P = W·b entries, D head_dim, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from minimax_tools.capture.passes import CachePair
from minimax_tools.errors import TargetError
from minimax_tools.machine.native_output import native_output_dropped
from neuron.devices.ranks import Ranks

# Number of the null block, and so also the slot of padding.
NULL_BLOCK = 0
# A block table's entry where a request has no block yet.
NO_BLOCK = -1
# Tokens of a block.
BLOCK_SIZE = 32
# Kernels of the plugin read a context of a multiple of this many tokens.
_CONTEXT_STEP = 128


class BlockCache:
    """The keys and values of all layers, [n,K,b,D] each, and the block tables of the running requests.

    `layers` are the plugin's own descriptions of what a model asks for: name, number of this rank's kv heads, head size
    and dtype.
    """

    def __init__(self, layers: Sequence[Any], *, device: torch.device) -> None:
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


# The plugin's smallest bucket of a prefill; the next ones are twice as large each.
SMALLEST_BUCKET = 128
# Most tokens of a request in a pass that is a decoding step.
_DECODE_TOKENS = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRequest:
    """The tokens of a pass, packed as vLLM Neuron's runner packs them, on the CPU."""

    input_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # slot of the cache that each token is written to, int64 [T]
    tables: torch.Tensor  # block tables of the requests, int32 [requests,W]
    sampled: torch.Tensor  # tokens whose logits are wanted, int64
    last_tokens: torch.Tensor  # of these, the last token of each request, int64 [requests]
    tokens_of_request: int  # tokens of the longest request in this pass
    num_cached: int  # tokens that the longest request has in the cache before this pass

    @property
    def is_prefill(self) -> bool:
        """False for a decoding step."""
        return self.tokens_of_request > _DECODE_TOKENS

    def metadata(self, device: torch.device) -> dict[str, Any]:
        """Return the attention metadata of one layer, the same for all of them."""
        tables = self.tables.to(device)
        return {
            "block_table_tensor": tables,
            "full_block_table_tensor": tables.clone(),
            "slot_mapping": self.slots.to(device),
            "max_query_len": self.tokens_of_request,
            "block_size": BLOCK_SIZE,
            "max_blocks_per_seq": tables.shape[1],
            "decode_token_threshold": _DECODE_TOKENS,
            "cached_seq_len": torch.tensor([[self.num_cached]], dtype=torch.int32, device=device),
            "kv_segment_size": 0,
        }


def pack_prompt(
    cache: BlockCache, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
) -> PackedRequest:
    """Pack the real tokens of a prompt [1,S], which becomes a new request, and pad them to a bucket.

    The padding has token 0, the last real position and the null block's slot. Logits of all S columns are wanted.
    """
    is_real = attention_mask[0].bool().cpu()
    num_tokens, num_columns = int(is_real.sum()), len(is_real)
    if not is_real[:num_tokens].all():
        raise TargetError(
            "vLLM Neuron takes prompts without padding before them",
            expected="a golden whose prompts are padded on the right",
            found=f"{int((~is_real).sum())} columns of padding before a prompt",
            next_step="Leave out --padding-side left.",
        )
    tokens = input_ids[0, :num_tokens].cpu()
    positions = position_ids[0, :num_tokens].cpu()
    slots = cache.slots(request := cache.add_request(), positions)
    num_padding = bucket_of(num_columns) - num_tokens
    return PackedRequest(
        input_ids=torch.cat((tokens.int(), torch.zeros(num_padding, dtype=torch.int32))),
        positions=torch.cat((positions, positions[-1:].expand(num_padding))),
        slots=torch.cat((slots, torch.full((num_padding,), NULL_BLOCK))),
        tables=cache.tables([request]),
        sampled=torch.arange(num_columns),
        last_tokens=torch.tensor([num_tokens - 1]),
        tokens_of_request=bucket_of(num_columns),
        num_cached=0,
    )


def pack_step(cache: BlockCache, input_ids: torch.Tensor, position_ids: torch.Tensor) -> PackedRequest:
    """Pack one token of each request, [B,1]."""
    requests = range(cache.num_requests)
    tokens, positions = input_ids[:, 0].cpu(), position_ids[:, 0].cpu()
    slots = torch.cat([cache.slots(request, positions[request : request + 1]) for request in requests])
    return PackedRequest(
        input_ids=tokens.int(),
        positions=positions,
        slots=slots,
        tables=cache.tables(requests),
        sampled=torch.arange(len(tokens)),
        last_tokens=torch.arange(len(tokens)),
        tokens_of_request=_DECODE_TOKENS,
        num_cached=int(positions.max()),
    )


def bucket_of(num_tokens: int) -> int:
    """Return the smallest bucket that holds so many tokens."""
    bucket = SMALLEST_BUCKET
    while bucket < num_tokens:
        bucket *= 2
    return bucket


# Ranks may wait for long while the lead copies a checkpoint.
_TIMEOUT = timedelta(hours=2)


class DividedTokens:
    """The ranks' parts of a pass's tokens. All ranks make the same calls in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._num_tokens = 0  # T of the present pass, if it is divided
        # Apart from the collective calls of the port.
        self._group: Any = new_host_group() if ranks.are_several else None

    def begin(self, request: PackedRequest) -> None:
        """Note the tokens of the pass that comes next."""
        self._num_tokens = len(request.input_ids) if request.is_prefill else 0

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return [T,…] of all ranks' parts, on the CPU; a tensor that is no part is returned as it is."""
        degree = self.ranks.degree
        if not self.ranks.are_several or tensor.ndim == 0 or tensor.shape[0] * degree != self._num_tokens:
            return tensor
        part = tensor.to("cpu").contiguous()
        parts = [torch.empty_like(part) for _ in range(degree)]
        # As bytes: gloo does not know every dtype.
        torch.distributed.all_gather(
            [one.view(torch.uint8) for one in parts], part.view(torch.uint8), group=self._group
        )
        return torch.cat(parts)

    def cut(self, states: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of states [1,S,H], padded with zeros to their bucket: [1,T/ranks,H]."""
        if not self.ranks.are_several:
            return states
        padded = states.new_zeros((1, bucket_of(states.shape[1]), states.shape[2]))
        padded[:, : states.shape[1]] = states
        return padded.chunk(self.ranks.degree, dim=1)[self.ranks.rank]


def new_host_group() -> Any:
    """Open a group of all ranks for tensors on the host; every rank makes the call."""
    with native_output_dropped():
        return torch.distributed.new_group(backend="gloo", timeout=_TIMEOUT)


def refuse_uneven(ranks: Ranks) -> None:
    """Raise TargetError if the ranks cannot divide the smallest bucket of a prefill."""
    if SMALLEST_BUCKET % ranks.degree:
        raise TargetError(
            f"{ranks.degree} ranks do not divide a prefill of {SMALLEST_BUCKET} tokens",
            expected=f"a --tp-degree that divides {SMALLEST_BUCKET}",
            found=str(ranks.degree),
            next_step="The plugin gives each rank the same number of tokens.",
        )
