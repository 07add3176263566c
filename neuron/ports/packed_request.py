"""PackedRequest: the tokens of a pass as the runner of vLLM Neuron packs them, in one dimension without a batch.

A prefill takes one prompt, padded to a bucket. A decoding step takes one token of each request.
B requests, S columns of a prompt, T tokens of a pass, W blocks of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from minimax_tools.errors import TargetError
from neuron.ports.block_cache import BLOCK_SIZE, NULL_BLOCK, BlockCache

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
