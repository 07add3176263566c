"""An example port of MiniMax-M2's decoder layer, to copy and to fill with your own kernels.

It needs only torch. Like real ports it fuses q, k and v, groups the experts' weights, and keeps every shape
independent of the routing. Judge it with:

    mm2-test sweep --model DIR --golden DIR --target scripts/examples/port.py:DecoderLayer

What mm2 asks of a port:

- NAME(config, layer_idx) returns the module
- `convert_state_dict` turns the hub's tensors into the module's
- `forward` takes (hidden_states, attention_mask, position_ids)
- `sites` names the submodules whose values mm2 compares

B batch, S sequence, T tokens, H hidden, N heads, K kv heads, D head_dim, E experts.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Norm(nn.Module):
    """RMSNorm over the whole last dim."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, states):
        """Normalise states [..., width]."""
        exact = states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(states.dtype)


class Attention(nn.Module):
    """Attention with fused q, k and v, norms over their whole widths, and partial rotary embedding."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.query_width = config.num_attention_heads * config.head_dim
        self.key_width = config.num_key_value_heads * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, self.query_width + 2 * self.key_width, bias=False)
        self.o_proj = nn.Linear(self.query_width, config.hidden_size, bias=False)
        self.q_norm = Norm(self.query_width, config.rms_norm_eps)
        self.k_norm = Norm(self.key_width, config.rms_norm_eps)
        # mm2 reads the outputs of submodules: so each value that it compares passes through one.
        self.q_proj, self.k_proj, self.v_proj = nn.Identity(), nn.Identity(), nn.Identity()
        self.q_rope, self.k_rope = nn.Identity(), nn.Identity()

    def forward(self, states, attention_mask, position_ids):
        """Map [B,S,H] to [B,S,H]."""
        q, k, v = self.qkv_proj(states).split((self.query_width, self.key_width, self.key_width), dim=-1)
        q, k, v = self.q_proj(q), self.k_proj(k), self.v_proj(v)
        q = self.q_rope(self.rotate(self.heads(self.q_norm(q)), position_ids))
        k = self.k_rope(self.rotate(self.heads(self.k_norm(k)), position_ids))
        return self.o_proj(self.attend(q, k, self.heads(v), attention_mask))

    def heads(self, flat):
        """Reshape [B,S,heads·D] to [B,heads,S,D]."""
        return flat.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def frequencies(self, device):
        """Return the frequencies [rotary_dim / 2], float32."""
        dims = torch.arange(0, self.config.rotary_dim, 2, dtype=torch.float32, device=device)
        return 1.0 / self.config.rope_theta ** (dims / self.config.rotary_dim)

    def rotate(self, heads, position_ids):
        """Rotate the first rotary_dim dims of each head in pairs: dim i with dim i + rotary_dim / 2."""
        frequencies = self.frequencies(heads.device)
        angles = position_ids[:, None, :, None].float() * frequencies
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        width = 2 * frequencies.shape[0]
        first, second = heads[..., :width].chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, heads[..., width:]), dim=-1)

    def repeat(self, heads):
        """Repeat kv heads, [B,K,S,D] to [B,N,S,D]: neighbouring query heads share a kv head."""
        return heads.repeat_interleave(
            self.config.num_attention_heads // self.config.num_key_value_heads, dim=1
        )

    def attend(self, q, k, v, attention_mask):
        """Return the context [B,S,N·D]: causal, padding hidden, softmax in float32."""
        scores = (
            torch.matmul(q.float(), self.repeat(k).float().transpose(-1, -2)) * self.config.head_dim**-0.5
        )
        positions = torch.arange(q.shape[2], device=q.device)
        visible = (positions <= positions[:, None]) & attention_mask[:, None, None, :].bool()
        scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
        context = torch.matmul(scores.softmax(-1).to(v.dtype), self.repeat(v))
        return context.transpose(1, 2).flatten(2)


class Router(nn.Module):
    """Router, float32 throughout: the bias is near 9, where BF16 steps are 0.06."""

    def __init__(self, config):
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        shape = (config.num_local_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.register_buffer("correction_bias", torch.empty(config.num_local_experts, dtype=torch.float32))

    def forward(self, states):
        """Map [T,H] to logits [T,E], weights [T,k] and experts [T,k]."""
        logits = self.logits(states)
        scores = self.scores(logits)
        experts = self.choose(scores)
        return logits, self.weigh(scores, experts), experts

    def logits(self, states):
        """Return the logits [T,E], float32."""
        return states.float() @ self.weight.T

    def scores(self, logits):
        """Return the scores: sigmoid, not softmax."""
        return logits.sigmoid()

    def choose(self, scores):
        """Choose k experts per token; only the choice sees the bias."""
        return (scores + self.correction_bias).topk(self.num_experts_per_tok, dim=-1).indices

    def weigh(self, scores, experts):
        """Return the weights of the chosen experts: their unbiased scores, normalised."""
        weights = scores.gather(-1, experts)
        return weights / weights.sum(-1, keepdim=True)


class Moe(nn.Module):
    """Experts in slabs, each on all tokens, with a weight of 0 where it was not chosen."""

    slab = 16

    def __init__(self, config):
        super().__init__()
        experts, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.router = Router(config)
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(self, states):
        """Map [B,S,H] to [B,S,H]."""
        tokens = states.flatten(0, 1)
        _, weights, experts = self.router(tokens)
        numbers = torch.arange(self.down_proj.shape[0], device=tokens.device)
        affinities = torch.where(experts[:, :, None] == numbers, weights[:, :, None], 0.0).sum(1)
        total = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        for start in range(0, self.down_proj.shape[0], self.slab):
            slab = slice(start, start + self.slab)
            gate, up = torch.matmul(tokens, self.gate_up_proj[slab].transpose(1, 2)).chunk(2, dim=-1)
            output = torch.matmul(self.activate(gate, up), self.down_proj[slab].transpose(1, 2))
            total = total + (output.float() * affinities[:, slab].T[:, :, None]).sum(0)
        return total.to(states.dtype).unflatten(0, states.shape[:2])

    def activate(self, gate, up):
        """SwiGLU."""
        return functional.silu(gate) * up


class DecoderLayer(nn.Module):
    """The port: one module for all layers, its weights swapped, so that it compiles once."""

    reuse = True
    # Submodule whose output is the site; `:input` takes its input, `:output[0]` the first of several outputs.
    sites = {
        "input_norm": "input_layernorm",
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "q_rope": "self_attn.q_rope",
        "k_rope": "self_attn.k_rope",
        "attn_context": "self_attn.o_proj:input",
        "attn_delta": "self_attn",
        "attn_residual": "post_attention_layernorm:input",
        "post_norm": "post_attention_layernorm",
        "router_logits": "moe.router:output[0]",
        "router_weights": "moe.router:output[1]",
        "router_experts": "moe.router:output[2]",
        "moe_delta": "moe",
    }

    def __init__(self, config, layer_idx):
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.moe = Moe(config)

    def convert_state_dict(self, tensors, config, layer_idx):
        """Fuse q, k and v, and stack the experts, gate rows before up rows."""
        attention, moe = "self_attn.", "block_sparse_moe."
        experts = [f"{moe}experts.{expert}." for expert in range(config.num_local_experts)]
        return {
            "input_layernorm.weight": tensors["input_layernorm.weight"],
            "post_attention_layernorm.weight": tensors["post_attention_layernorm.weight"],
            "self_attn.qkv_proj.weight": torch.cat(
                [tensors[f"{attention}{name}_proj.weight"] for name in "qkv"]
            ),
            "self_attn.o_proj.weight": tensors[f"{attention}o_proj.weight"],
            "self_attn.q_norm.weight": tensors[f"{attention}q_norm.weight"],
            "self_attn.k_norm.weight": tensors[f"{attention}k_norm.weight"],
            "moe.router.weight": tensors[f"{moe}gate.weight"],
            "moe.router.correction_bias": tensors[f"{moe}e_score_correction_bias"],
            "moe.gate_up_proj": torch.stack(
                [torch.cat((tensors[name + "w1.weight"], tensors[name + "w3.weight"])) for name in experts]
            ),
            "moe.down_proj": torch.stack([tensors[name + "w2.weight"] for name in experts]),
        }

    def forward(self, hidden_states, attention_mask, position_ids):
        """Map [B,S,H] to [B,S,H]."""
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), attention_mask, position_ids
        )
        return hidden_states + self.moe(self.post_attention_layernorm(hidden_states))
