"""The example port with a KV cache: what `port.py` needs in addition in order to decode.

A port that decodes accepts `past_key_value`, and returns the new past as its second output. Judge it with:

    mm2-test sweep --model DIR --golden DIR --decode 8 --target scripts/examples/cached_port.py:DecoderLayer
    mm2-test full --model DIR --golden DIR --target scripts/examples/cached_port.py:DecoderLayer

The past is a pair [B,K,P,D]: the rotated keys and the values of the tokens before. The mask is then [B,P+S], and tokens
with a 0 must not be attended to. All steps get a past of one length, so no step compiles again; the mask is 0 where the
past is not filled yet.

B batch, S sequence, P length of the past, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

import port
import torch


class Attention(port.Attention):
    """Attention that sees the past too, and returns all keys and values."""

    def forward(self, states, attention_mask, position_ids, past_key_value=None):
        """Return the output [B,S,H] for states [B,S,H], and keys and values [B,K,P+S,D]."""
        q, k, v = self.qkv_proj(states).split((self.query_width, self.key_width, self.key_width), dim=-1)
        q, k, v = self.q_proj(q), self.k_proj(k), self.v_proj(v)
        q = self.q_rope(self.rotate(self.heads(self.q_norm(q)), position_ids))
        k = self.k_rope(self.rotate(self.heads(self.k_norm(k)), position_ids))
        v = self.heads(v)
        if past_key_value is not None:
            past_k, past_v = past_key_value
            k, v = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
        return self.o_proj(self.attend(q, k, v, attention_mask)), (k, v)

    def attend(self, q, k, v, attention_mask):
        """Attend to all of the past, and to the positions of this pass up to the own one."""
        num_past = k.shape[2] - q.shape[2]
        positions = torch.arange(k.shape[2], device=q.device)
        visible = (positions <= positions[num_past:, None]) & attention_mask[:, None, None, :].bool()
        scores = (
            torch.matmul(q.float(), self.repeat(k).float().transpose(-1, -2)) * self.config.head_dim**-0.5
        )
        scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
        context = torch.matmul(scores.softmax(-1).to(v.dtype), self.repeat(v))
        return context.transpose(1, 2).flatten(2)


class DecoderLayer(port.DecoderLayer):
    """The port; its attention returns a pair, whose first value is attn_delta."""

    sites = {**port.DecoderLayer.sites, "attn_delta": "self_attn:output[0]"}

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = Attention(config)

    def forward(self, hidden_states, attention_mask, position_ids, past_key_value=None):
        """Map [B,S,H], a mask [B,P+S] and positions [B,S] to the output [B,S,H], and keys and values [B,K,P+S,D]."""
        normed = self.input_layernorm(hidden_states)
        delta, key_value = self.self_attn(normed, attention_mask, position_ids, past_key_value)
        hidden_states = hidden_states + delta
        return hidden_states + self.moe(self.post_attention_layernorm(hidden_states)), key_value
