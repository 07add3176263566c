"""Sizes of `bench_loading.py`: full, or a toy that tries the script out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from minimax_tools.synthetic.toy_model import SyntheticModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingScale:
    """Sizes of a measurement."""

    model: SyntheticModel  # the model that is loaded, streamed and offloaded
    large: SyntheticModel  # a model of few large layers, for packed experts
    shard_bytes: int  # largest size of a BF16 shard; FP8 shards have half of it
    split_layers: int  # number of layers of `model` that are split in three: bottom, trunk, top
    qwen2: Mapping[str, int]  # quantities of the Qwen2 that is split so too
    expert: tuple[int, int, int]  # experts that are dequantised: their number, intermediate and hidden size
    rounds: int  # number of times that each ratio is measured


SCALES: Mapping[str, LoadingScale] = {
    # 5.05 GB in BF16: 16 layers of 307 MB.
    "full": LoadingScale(
        model=SyntheticModel(
            num_hidden_layers=16,
            hidden_size=1024,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            rotary_dim=32,
            num_local_experts=64,
            num_experts_per_tok=8,
            intermediate_size=768,
            vocab_size=32000,
        ),
        # Two of MiniMax-M2's own layers, 3.7 GB each in FP8, between its embedding and its head.
        large=replace(SyntheticModel.m2(), num_hidden_layers=2),
        shard_bytes=900_000_000,
        split_layers=4,
        qwen2={
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 32000,
        },
        expert=(64, 1536, 3072),
        rounds=3,
    ),
    "toy": LoadingScale(
        model=SyntheticModel(num_local_experts=16, num_experts_per_tok=2),
        large=SyntheticModel(num_hidden_layers=2),
        shard_bytes=4_000_000,
        split_layers=4,
        qwen2={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        },
        expert=(2, 256, 256),
        rounds=1,
    ),
}
