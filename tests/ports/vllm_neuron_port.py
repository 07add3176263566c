"""MiniMax-M2 for the vLLM Neuron plugin, on its building blocks, for the test of `--target vllm-neuron:`.

Its methods are those that the plugin's runner calls. Attention is divided among ranks by heads, all else by tokens.
T tokens of a pass, B requests, N heads, K kv heads, D head_dim,
n blocks of b tokens, P entries that a block table names.
"""

from __future__ import annotations

import torch
import vllm_neuron.functional as NF  # noqa: N812 - the plugin's own name
import vllm_neuron.nn as neuron_nn
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm_neuron.model.kv_cache import KVSpec, LayerSpec
from vllm_neuron.nn.embedding import VocabDimShardedEmbedding
from vllm_neuron.nn.sampler import Sampler
from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint
from vllm_neuron.utils.weight_loader import SafetensorsWeightLoader, set_weight_loader


def product(a, b):
    """Return a @ b of BF16 tensors, added up in float32 as devices do.

    torch's own is fifteen times slower on CPUs without BF16 instructions.
    """
    return (a.float() @ b.float()).to(a.dtype)


def part_of(values, rank, dim):
    """Return a rank's part of values along a dim."""
    return values.chunk(get_tp_group().world_size, dim=dim)[rank]


def fused_qkv(slices, rank):
    """Join the rank's rows of q, k and v, to [H,out]."""
    return torch.cat([part_of(one[:], rank, 0).T for one in slices], dim=1)


def output_projection(slices, rank):
    """Return the rank's columns, [in,H]."""
    return part_of(slices[0][:], rank, 1).T


def norm_weight(slices, rank):
    """Return the rank's part of a norm's weight."""
    return part_of(slices[0][:], rank, 0)


def downs(slices, rank):
    """Stack the down matrices, to [E,I,H]."""
    return torch.stack([one[:].T for one in slices])


def load_by(parameter, transform):
    """Attach a loader to a parameter."""
    set_weight_loader(parameter, SafetensorsWeightLoader(transform=transform))


def gates_and_ups(slices, rank):
    """Join the gate and the up matrix of each expert, to [E,H,2·I]."""
    pairs = zip(slices[::2], slices[1::2], strict=True)
    return torch.stack([torch.cat((gate[:].T, up[:].T), dim=1) for gate, up in pairs])


class Norm(nn.Module):
    """RMSNorm over the whole last dim."""

    def __init__(self, width, eps, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.eps = eps

    def forward(self, states):
        exact = states.float()
        exact = exact * torch.rsqrt(self.mean_square(exact) + self.eps)
        return self.weight * exact.to(states.dtype)

    def mean_square(self, exact):
        return exact.pow(2).mean(-1, keepdim=True)


class DividedNorm(Norm):
    """RMSNorm over the widths of all ranks."""

    def __init__(self, width, eps, dtype):
        super().__init__(width, eps, dtype)
        load_by(self.weight, norm_weight)

    def mean_square(self, exact):
        group = get_tp_group()
        total = super().mean_square(exact)
        return group.all_reduce(total) / group.world_size


class Attention(nn.Module):
    """Attention with a paged cache, which the runner binds."""

    def __init__(self, config, layer_idx):
        super().__init__()
        assert get_current_vllm_config().cache_config.cache_dtype == "auto"
        self.group = get_tp_group()
        self.config, self.name = config, f"layers.{layer_idx}.self_attn"
        self.widths = [
            heads // self.group.world_size * config.head_dim
            for heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        ]
        dtype = config.torch_dtype
        self.qkv_proj_weight = nn.Parameter(torch.empty(config.hidden_size, sum(self.widths), dtype=dtype))
        self.o_proj_weight = nn.Parameter(torch.empty(self.widths[0], config.hidden_size, dtype=dtype))
        load_by(self.qkv_proj_weight, fused_qkv)
        load_by(self.o_proj_weight, output_projection)
        self.q_norm = DividedNorm(self.widths[0], config.rms_norm_eps, dtype)
        self.k_norm = DividedNorm(self.widths[1], config.rms_norm_eps, dtype)
        self.k_cache = self.v_cache = None

    def forward(self, hidden_states, positions, position_embeddings, attn_metadata):
        metadata = attn_metadata[self.name]
        is_prefill = metadata["max_query_len"] > metadata["decode_token_threshold"]
        if is_prefill:
            # Between attentions each rank has some of the tokens.
            hidden_states = self.group.all_gather(hidden_states, dim=0)
        q, k, v = product(hidden_states, self.qkv_proj_weight).split(self.widths, dim=-1)
        q, k, v = self.heads(self.q_norm(q)), self.heads(self.k_norm(k)), self.heads(v)
        q, k = (self.rotate(heads, position_embeddings) for heads in (q, k))
        self.write(k, v, metadata["slot_mapping"], metadata["block_size"])
        if not is_prefill:
            context = self.decode(q, positions, metadata)
        else:
            k, v = (heads.repeat_interleave(len(q) // len(k), dim=0) for heads in (k, v))
            scale = self.config.head_dim**-0.5
            context = NF.flash_attention(
                q.transpose(1, 2), k.transpose(1, 2), v, scale=scale, tp_q=False, tp_out=True
            )
            context = context.permute(2, 0, 1)
        partial = product(context.flatten(1), self.o_proj_weight).float()
        summed = self.group.reduce_scatter(partial, dim=0) if is_prefill else self.group.all_reduce(partial)
        return summed.to(hidden_states.dtype)

    def heads(self, flat):
        """Reshape [T,heads·D] to [heads,T,D]."""
        return flat.unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)

    def rotate(self, heads, position_embeddings):
        """Rotate the first rotary_dim dims of heads [heads,T,D]."""
        cos, sin = position_embeddings
        first, second = heads[..., : self.config.rotary_dim].chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*turned, heads[..., self.config.rotary_dim :]), dim=-1)

    def write(self, k, v, slots, block_size):
        """Write keys and values [K,T,D] to their slots."""
        blocks, places = slots // block_size, slots % block_size
        self.k_cache[blocks, :, places] = k.transpose(0, 1)
        self.v_cache[blocks, :, places] = v.transpose(0, 1)

    def decode(self, q, positions, metadata):
        """Return the context [B,N,D] of one token of each request."""
        tables = metadata["block_table_tensor"].long()
        # [B,W,K,b,D] to [B,K,P,D]
        k, v = (pool[tables].transpose(1, 2).flatten(2, 3) for pool in (self.k_cache, self.v_cache))
        k, v = (heads.repeat_interleave(len(q) // heads.shape[1], dim=1) for heads in (k, v))
        scores = torch.einsum("nbd,bnpd->bnp", q.float(), k.float()) * self.config.head_dim**-0.5
        entries = torch.arange(k.shape[2], device=q.device)
        visible = entries <= self.last_visible(positions)[:, None]
        weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1).to(v.dtype)
        return torch.einsum("bnp,bnpd->bnd", weights, v)

    def last_visible(self, positions):
        """Return the last entry [B] that each request's token may see: its own."""
        return positions


class Gate(nn.Module):
    """Router, float32 throughout."""

    def __init__(self, config):
        super().__init__()
        self.num_chosen = config.num_experts_per_tok
        shape = (config.num_local_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.e_score_correction_bias = nn.Parameter(torch.empty(shape[0], dtype=torch.float32))

    def forward(self, states):
        logits = states.float() @ self.weight.T
        scores = logits.sigmoid()
        experts = (scores + self.e_score_correction_bias).topk(self.num_chosen, dim=-1).indices
        weights = scores.gather(-1, experts)
        return logits, weights / weights.sum(-1, keepdim=True), experts


class Experts(nn.Module):
    """The mixture of experts, each on all tokens."""

    def __init__(self, config):
        super().__init__()
        num, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate = Gate(config)
        self.gate_up_proj_weight = nn.Parameter(torch.empty(num, hidden, 2 * inner, dtype=config.torch_dtype))
        self.down_proj_weight = nn.Parameter(torch.empty(num, inner, hidden, dtype=config.torch_dtype))
        load_by(self.gate_up_proj_weight, gates_and_ups)
        load_by(self.down_proj_weight, downs)

    def forward(self, hidden_states, is_prefill):
        _, weights, experts = self.gate(hidden_states)
        affinities = torch.zeros(len(hidden_states), len(self.down_proj_weight)).scatter(1, experts, weights)
        gate, up = product(hidden_states, self.gate_up_proj_weight).chunk(2, dim=-1)
        outputs = product(nn.functional.silu(gate) * up, self.down_proj_weight)
        return (outputs.float() * affinities.T[:, :, None]).sum(0).to(hidden_states.dtype)


class DecoderLayer(nn.Module):
    """A layer."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps, config.torch_dtype)
        self.self_attn = Attention(config, layer_idx)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps, config.torch_dtype)
        self.mlp = Experts(config)

    def forward(self, hidden_states, positions, position_embeddings, attn_metadata):
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(
            hidden_states=normed,
            positions=positions,
            position_embeddings=position_embeddings,
            attn_metadata=attn_metadata,
        )
        threshold = attn_metadata[self.self_attn.name]["decode_token_threshold"]
        is_prefill = attn_metadata[self.self_attn.name]["max_query_len"] > threshold
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states), is_prefill=is_prefill)


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    layer_class = DecoderLayer

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = VocabDimShardedEmbedding(
            vocab_size=config.vocab_size,
            embed_dim=config.hidden_size,
            dtype=config.torch_dtype,
            tp_group=get_tp_group().device_group,
        )
        self.layers = nn.ModuleList(
            self.layer_class(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps, config.torch_dtype)

    def forward(self, input_ids, positions, attn_metadata, rank):
        metadata = next(iter(attn_metadata.values()))
        is_prefill = metadata["max_query_len"] > metadata["decode_token_threshold"]
        hidden_states = self.embed_tokens(input_ids, scatter_tokens=is_prefill, rank=rank)
        dims = torch.arange(0, self.config.rotary_dim, 2, dtype=torch.float32, device=input_ids.device)
        angles = positions[:, None].float() / self.config.rope_theta ** (dims / self.config.rotary_dim)
        embeddings = (angles.cos().to(hidden_states.dtype), angles.sin().to(hidden_states.dtype))
        hidden_states = self.run_layers(hidden_states, positions, embeddings, attn_metadata)
        return get_tp_group().all_gather(hidden_states, dim=0) if is_prefill else hidden_states

    def run_layers(self, hidden_states, positions, embeddings, attn_metadata):
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                positions=positions,
                position_embeddings=embeddings,
                attn_metadata=attn_metadata,
            )
        return self.norm(hidden_states)


class MiniMaxM2ForCausalLM(nn.Module):
    """The model as the plugin's runner calls it."""

    backbone_class = Backbone

    def __init__(self, config, neuron_config):
        super().__init__()
        self.config, self.neuron_config = config, neuron_config
        self.model = self.backbone_class(config)
        self.samples = neuron_config.on_device_sampling_config is not None
        self.lm_head = neuron_nn.ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            dtype=config.torch_dtype,
            gather_output=not self.samples,
            tp_group=get_tp_group().device_group,
        )
        if self.samples:
            self.sampler = Sampler(neuron_config.on_device_sampling_config, process_group=None)

    @classmethod
    def from_configs(cls, hf_config, neuron_config):
        return cls(hf_config, neuron_config)

    @torch.no_grad()
    def forward(
        self,
        input_ids,
        positions,
        attn_metadata=None,
        sampling_positions=None,
        sampling_params=None,
        spec_decode_metadata=None,
        logit_mask=None,
        rank=None,
    ):
        hidden_states = self.model(input_ids, positions.to(torch.int32), attn_metadata, rank)
        logits = self.lm_head(torch.index_select(hidden_states, dim=0, index=sampling_positions))
        if not self.samples:
            return logits
        gathered = logits if self.neuron_config.max_logprobs != 0 else None
        return self.sampler(logits, sampling_params, logit_mask=logit_mask, tp_rank=rank), gathered

    def get_kv_spec(self):
        attentions = [layer.self_attn for layer in self.model.layers]
        return KVSpec(
            layers=[
                LayerSpec(
                    name=attention.name,
                    num_kv_heads=self.config.num_key_value_heads // get_tp_group().world_size,
                    head_size=self.config.head_dim,
                    dtype=self.config.torch_dtype,
                )
                for attention in attentions
            ]
        )

    def bind_kv_cache(self, kv_caches):
        for layer in self.model.layers:
            layer.self_attn.k_cache, layer.self_attn.v_cache = kv_caches[layer.self_attn.name]

    def load_weights(self, checkpoint_path, device, cache_dir):
        checkpoint = SafetensorsCheckpoint(checkpoint_path, cache_dir)
        group = get_tp_group()
        result = checkpoint.load_sharded(
            group.rank_in_group, group.world_size, self, self.mappings(), device, strict=False
        )
        self.load_state_dict(result.state_dict, strict=False, assign=True)

    def mappings(self):
        """Return the checkpoint's names of each parameter that has another name, or several sources."""
        names = {}
        for index in range(self.config.num_hidden_layers):
            layer = f"model.layers.{index}."
            attention, moe = layer + "self_attn.", layer + "block_sparse_moe."
            experts = [f"{moe}experts.{expert}." for expert in range(self.config.num_local_experts)]
            names |= {
                attention + "qkv_proj_weight": [f"{attention}{one}_proj.weight" for one in "qkv"],
                attention + "o_proj_weight": attention + "o_proj.weight",
                layer + "mlp.gate.weight": moe + "gate.weight",
                layer + "mlp.gate.e_score_correction_bias": moe + "e_score_correction_bias",
                layer + "mlp.gate_up_proj_weight": [
                    f"{expert}{one}.weight" for expert in experts for one in self.gate_and_up(index)
                ],
                layer + "mlp.down_proj_weight": [f"{expert}w2.weight" for expert in experts],
            }
        return names

    def gate_and_up(self, layer_idx):
        """Return the checkpoint's names of the gate and the up matrix."""
        return ("w1", "w3")


class Sampling(MiniMaxM2ForCausalLM):
    """The right model, which samples on the device and returns the logits too."""

    mm2_neuron_config = {"on_device_sampling_config": {}, "max_logprobs": -1}


class Swapped(MiniMaxM2ForCausalLM):
    """Gate and up exchanged in layer 2."""

    def gate_and_up(self, layer_idx):
        return ("w3", "w1") if layer_idx == 2 else super().gate_and_up(layer_idx)


class _ShortSighted(Attention):
    """A decoding step that does not see its own token."""

    def last_visible(self, positions):
        return positions - 1


class _ShortSightedLayer(DecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if layer_idx == 1:
            self.self_attn = _ShortSighted(config, layer_idx)


class _ShortSightedBackbone(Backbone):
    layer_class = _ShortSightedLayer


class ShortSighted(MiniMaxM2ForCausalLM):
    """In layer 1, a decoding step that does not see its own token."""

    backbone_class = _ShortSightedBackbone


class Unloaded(MiniMaxM2ForCausalLM):
    """A final norm that is looked for under a wrong name."""

    def mappings(self):
        return {**super().mappings(), "model.norm.weight": "norm.weight"}


class _AddingNorm(Norm):
    """RMSNorm that adds the residual stream's summands first."""

    def forward(self, states, residual=None):
        residual = states if residual is None else states + residual
        return super().forward(residual), residual


class _SummandLayer(DecoderLayer):
    """A layer that passes the residual stream on as two summands, as vLLM's own models do."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        width, eps, dtype = config.hidden_size, config.rms_norm_eps, config.torch_dtype
        self.input_layernorm = _AddingNorm(width, eps, dtype)
        self.post_attention_layernorm = _AddingNorm(width, eps, dtype)

    def forward(self, positions, hidden_states, residual, embeddings, attn_metadata):
        normed, residual = self.input_layernorm(hidden_states, residual)
        delta = self.self_attn(normed, positions, embeddings, attn_metadata)
        normed, residual = self.post_attention_layernorm(delta, residual)
        return self.mlp(normed, is_prefill=len(positions) > 1), residual


class _SummandBackbone(Backbone):
    layer_class = _SummandLayer

    def __init__(self, config):
        super().__init__(config)
        self.norm = _AddingNorm(config.hidden_size, config.rms_norm_eps, config.torch_dtype)

    def run_layers(self, hidden_states, positions, embeddings, attn_metadata):
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual, embeddings, attn_metadata)
        return self.norm(hidden_states, residual)[0]


class Summands(MiniMaxM2ForCausalLM):
    """The right model with layers in vLLM's own style."""

    backbone_class = _SummandBackbone


class SwappedSummands(Swapped):
    """The model with gate and up exchanged in layer 2."""

    backbone_class = _SummandBackbone


class _NormOfRank(DividedNorm):
    """The mean square of the rank's own width."""

    mean_square = Norm.mean_square


class NormPerRank(MiniMaxM2ForCausalLM):
    """In layer 1, queries normed on each rank for itself."""

    def __init__(self, config, neuron_config):
        super().__init__(config, neuron_config)
        attention = self.model.layers[1].self_attn
        attention.q_norm = _NormOfRank(attention.widths[0], config.rms_norm_eps, config.torch_dtype)
