"""An example port divided among ranks: each holds a part of the heads, and a part of every expert's width.

Every rank is a process that builds this module and holds its part of the weights. Judge it on one rank, then on more:

    mm2-test sweep --model DIR --golden DIR --target scripts/examples/tensor_parallel_port.py:DecoderLayer
    mm2-test sweep … --target scripts/examples/tensor_parallel_port.py:DecoderLayer --tp-degree 4

What ranks add to `port.py`:

- `convert_state_dict` cuts the rank's part
- the norms of q and k cover all heads, so they need a sum over all ranks
- o_proj and the experts end in a sum over all ranks
- `sites` says after `@` what a rank shows of each site: `@shard(2)` a part of dim 2, `@replicate` the whole; `@partial`
  would be a sum that is still to be reduced

B batch, S sequence, T tokens, H hidden, N heads, K kv heads, D head_dim.
"""

from __future__ import annotations

import copy

import port
import torch
import torch.distributed as dist
from torch import nn


def sum_over_ranks(partial, dtype):
    """Add up in float32 and round once: BF16 sums of many ranks lose digits."""
    total = partial.float()
    dist.all_reduce(total)
    return total.to(dtype)


class WideNorm(nn.Module):
    """RMSNorm over the heads of all ranks; this rank holds some of them.

    Args:
        width: Width of all heads of the model together.
        num_copies: Number of ranks that hold each head: all ranks together hold so many copies of the width.
    """

    def __init__(self, width, num_copies, eps):
        super().__init__()
        self.width, self.num_copies, self.eps = width, num_copies, eps
        self.weight = nn.Parameter(torch.empty(width * num_copies // dist.get_world_size()))

    def forward(self, states):
        """Normalise this rank's states [..., heads·D]."""
        exact = states.float()
        squares = exact.pow(2).sum(-1, keepdim=True)
        # The norm covers all heads: without this sum every rank would scale its heads by another number.
        dist.all_reduce(squares)
        # The sum over the ranks counts each head `num_copies` times, and so must the width.
        exact = exact * torch.rsqrt(squares / (self.width * self.num_copies) + self.eps)
        return self.weight * exact.to(states.dtype)


class Attention(port.Attention):
    """The rank's query heads, and the kv heads that they read; ranks share a kv head if there are fewer of them."""

    def __init__(self, config):
        num_ranks = dist.get_world_size()
        num_copies = max(1, num_ranks // config.num_key_value_heads)
        # `port.Attention` builds the rank's part as if it were a whole model with fewer heads.
        rank_config = copy.copy(config)
        rank_config.num_attention_heads = config.num_attention_heads // num_ranks
        rank_config.num_key_value_heads = config.num_key_value_heads * num_copies // num_ranks
        super().__init__(rank_config)
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_norm = WideNorm(query_width, 1, config.rms_norm_eps)
        self.k_norm = WideNorm(key_width, num_copies, config.rms_norm_eps)

    def forward(self, states, attention_mask, position_ids):
        """Map [B,S,H] to [B,S,H], the same on all ranks."""
        partial = super().forward(states, attention_mask, position_ids)
        return sum_over_ranks(partial, states.dtype)


class Moe(port.Moe):
    """Router and experts: the rank holds its part of each expert's intermediate size, and the whole router."""

    def __init__(self, config):
        rank_config = copy.copy(config)
        rank_config.intermediate_size = config.intermediate_size // dist.get_world_size()
        super().__init__(rank_config)

    def forward(self, states):
        """Map [B,S,H] to [B,S,H], the same on all ranks."""
        return sum_over_ranks(super().forward(states), states.dtype)


class DecoderLayer(port.DecoderLayer):
    """The port; the number of ranks must divide the query heads and the intermediate size."""

    def __init__(self, config, layer_idx):
        # Not that of `port.DecoderLayer`, which would build modules with all heads.
        nn.Module.__init__(self)
        num_ranks, num_kv_heads = dist.get_world_size(), config.num_key_value_heads
        if config.num_attention_heads % num_ranks or config.intermediate_size % num_ranks:
            raise ValueError(
                f"{num_ranks} ranks do not divide {config.num_attention_heads} heads "
                f"and an intermediate size of {config.intermediate_size}"
            )
        if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
            raise ValueError(f"{num_ranks} ranks and {num_kv_heads} kv heads do not divide each other")
        self.input_layernorm = port.Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = port.Norm(config.hidden_size, config.rms_norm_eps)
        self.moe = Moe(config)
        # The kv heads that the ranks hold, in rank order: 0,0,1,1 if two ranks share each of two heads.
        num_copies = max(1, num_ranks // num_kv_heads)
        keys = ",".join(str(head) for head in range(num_kv_heads) for _ in range(num_copies))
        self.sites = {
            **{site: f"{path}@replicate" for site, path in port.DecoderLayer.sites.items()},
            "q_proj": "self_attn.q_proj@shard(2)",
            "q_norm": "self_attn.q_norm@shard(2)",
            "q_rope": "self_attn.q_rope@shard(1)",
            "attn_context": "self_attn.o_proj:input@shard(2)",
            "k_proj": f"self_attn.k_proj@shard(2; {keys})",
            "v_proj": f"self_attn.v_proj@shard(2; {keys})",
            "k_norm": f"self_attn.k_norm@shard(2; {keys})",
            "k_rope": f"self_attn.k_rope@shard(1; {keys})",
        }

    def convert_state_dict(self, tensors, config, layer_idx):
        """Cut the rank's part of each tensor, and name it as this module does."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        # With fewer kv heads than ranks, neighbouring ranks get the same part: of 2 heads, 4 ranks get 0, 0, 1 and 1.
        num_kv_parts = min(num_ranks, config.num_key_value_heads)

        def part(tensor, dim, index=rank, num_parts=num_ranks):
            return tensor.chunk(num_parts, dim=dim)[index]

        def kv_part(tensor):
            return part(tensor, 0, rank * num_kv_parts // num_ranks, num_kv_parts)

        attention, moe = "self_attn.", "block_sparse_moe."
        experts = [f"{moe}experts.{expert}." for expert in range(config.num_local_experts)]
        projections = (
            part(tensors[f"{attention}q_proj.weight"], 0),
            kv_part(tensors[f"{attention}k_proj.weight"]),
            kv_part(tensors[f"{attention}v_proj.weight"]),
        )
        return {
            "input_layernorm.weight": tensors["input_layernorm.weight"],
            "post_attention_layernorm.weight": tensors["post_attention_layernorm.weight"],
            "self_attn.qkv_proj.weight": torch.cat(projections),
            "self_attn.o_proj.weight": part(tensors[f"{attention}o_proj.weight"], 1),
            "self_attn.q_norm.weight": part(tensors[f"{attention}q_norm.weight"], 0),
            "self_attn.k_norm.weight": kv_part(tensors[f"{attention}k_norm.weight"]),
            "moe.router.weight": tensors[f"{moe}gate.weight"],
            "moe.router.correction_bias": tensors[f"{moe}e_score_correction_bias"],
            "moe.gate_up_proj": torch.stack(
                [
                    torch.cat((part(tensors[name + "w1.weight"], 0), part(tensors[name + "w3.weight"], 0)))
                    for name in experts
                ]
            ),
            "moe.down_proj": torch.stack([part(tensors[name + "w2.weight"], 1) for name in experts]),
        }
