"""Implementations: transformers' own ways to compute attention and experts, by name."""

from __future__ import annotations

EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
ATTN_IMPLEMENTATIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
