"""Arithmetic of a layer from its input to attn_residual, each stage a method that a mistake may override.

B prompts, S tokens of each in this pass, P before it in the cache, H hidden, N heads, K kv heads, D head_dim.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from faults.stages import Stages, Tap


class AttentionStages(Stages):
    """Norms, projections, rotation and attention."""

    def input_norm(self, states: torch.Tensor) -> torch.Tensor:
        """Compute input_norm, [B,S,H]."""
        return self.block_norm(states, self.weights.input_norm)

    def q_norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Compute q_norm over the whole width, [B,S,N·D]."""
        return self.head_norm(flat, self.weights.q_norm)

    def k_norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Compute k_norm over the whole width, [B,S,K·D]."""
        return self.head_norm(flat, self.weights.k_norm)

    def head_norm(self, flat: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute q_norm or k_norm; a mistake of both overrides this."""
        return self.normalise(flat, weight)

    def project(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project [B,S,H] to q [B,S,N·D], k and v [B,S,K·D]."""
        q, k, v = functional.linear(normed, self.weights.qkv).split(self.widths(), dim=-1)
        return q, k, v

    def widths(self) -> tuple[int, int, int]:
        """Return the widths of q, k and v."""
        key_width = self.config.num_key_value_heads * self.config.head_dim
        return self.config.num_attention_heads * self.config.head_dim, key_width, key_width

    def norm_and_rotate(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, tap: Tap
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm and rotate q [B,S,N·D] and k [B,S,K·D] to [B,N,S,D] and [B,K,S,D]; `tap` shows and returns a value."""
        q, k = tap("q_norm", self.q_norm(q)), tap("k_norm", self.k_norm(k))
        return (
            tap("q_rope", self.rotate(self.heads(q), positions)),
            tap("k_rope", self.rotate(self.heads(k), positions)),
        )

    def heads(self, flat: torch.Tensor) -> torch.Tensor:
        """Split [B,S,heads·D] into [B,heads,S,D]."""
        heads: torch.Tensor = flat.unflatten(-1, (-1, self.config.head_dim))
        return heads.transpose(1, 2)

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate the first dims of each head, [B,heads,S,D]."""
        width = self.rotary_width()
        turned = self.turn(heads[..., :width], self.angles(positions))
        return torch.cat((turned, heads[..., width:]), dim=-1)

    def rotary_width(self) -> int:
        """Return the number of dims of a head that are rotated."""
        return int(self.config.rotary_dim)

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Compute the angles, float32 [B,1,S,width/2]."""
        return positions[:, None, :, None].float() * self.frequencies(positions.device)

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """Compute the frequencies, float32 [width/2]."""
        width = self.rotary_width()
        return self.ladder(width, width, float(self.config.rope_theta), device)

    def ladder(self, width: int, divisor: int, theta: float, device: torch.device) -> torch.Tensor:
        """Compute theta^(−dim ∕ divisor) for dims 0, 2, 4, … below `width`, float32 [width/2]."""
        dims = torch.arange(0, width, 2, dtype=torch.float32, device=device)
        return 1.0 / theta ** (dims / divisor)

    def turn(self, part: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotate all dims of [B,heads,S,width], pairing i with i + width/2."""
        cos, sin = angles.cos().to(part.dtype), angles.sin().to(part.dtype)
        first, second = part.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def repeat(self, heads: torch.Tensor) -> torch.Tensor:
        """Repeat kv heads [B,K,…] to [B,N,…]: neighbouring query heads share one."""
        return heads.repeat_interleave(self.group_size(), dim=1)

    def group_size(self) -> int:
        """Return the number of query heads per kv head."""
        return int(self.config.num_attention_heads // self.config.num_key_value_heads)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend with q [B,N,S,D] to k and v [B,K,P+S,D]; the mask is [B,P+S], the context [B,S,N·D]."""
        scores = self.attention_scores(q, self.repeat(k))
        scores = torch.where(self.visible(mask, q.shape[2]), scores, torch.finfo(torch.float32).min)
        context = torch.matmul(self.attention_weights(scores).to(v.dtype), self.repeat(v))
        return context.transpose(1, 2).flatten(2)

    def attention_scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Compute the scaled scores, float32 [B,N,S,P+S]."""
        scale = 1 / math.sqrt(self.config.head_dim)
        return torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale

    def visible(self, mask: torch.Tensor, num_queries: int) -> torch.Tensor:
        """Mark what each of the last `num_queries` tokens sees: real tokens up to itself, bool [B,1,S,P+S]."""
        return self.causal(mask.shape[1], num_queries, mask.device) & mask[:, None, None, :].bool()

    def causal(self, length: int, num_queries: int, device: torch.device) -> torch.Tensor:
        """Mark the tokens up to each of the last `num_queries` of `length`, padding too, bool [S,P+S]."""
        places = torch.arange(length, device=device)
        return places <= places[length - num_queries :, None]

    def attention_weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Compute the softmax in float32."""
        return scores.softmax(-1)

    def project_out(self, context: torch.Tensor) -> torch.Tensor:
        """Project the context [B,S,N·D] to attn_delta [B,S,H]."""
        return functional.linear(context, self.weights.o_proj)

    def add_attention(self, states: torch.Tensor, delta: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Add attn_delta to the layer's input: attn_residual [B,S,H]; a mistake may add `normed` instead."""
        return states + delta
