"""Probes of `ModelFactory.create_split_models`, and a model to split.

A probe is a function that `loading/probe.py` calls in a process of its own; it returns numbers and digests by name.
Some imports are for no name (F401): the libraries make them while they run, where they would count in time and memory.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import accelerate.hooks  # noqa: F401
import torch
import transformers.integrations.moe
import transformers.masking_utils  # noqa: F401
from transformers import MiniMaxM2ForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: F401
from transformers.utils import logging as transformers_logging

from loading.inputs import digest_of
from minimax_tools.split.factory import ModelFactory

transformers_logging.disable_progress_bar()


def write_qwen2(folder: str, shard_bytes: int, quantities: dict[str, int]) -> dict[str, int]:
    """Write a Qwen2 model of transformers' random initial weights, in several shards."""
    torch.manual_seed(0)
    config = Qwen2Config.from_dict({**quantities, "dtype": "bfloat16"})
    model = Qwen2ForCausalLM._from_config(config)
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    return {"num_bytes": sum(parameter.nbytes for parameter in model.parameters())}


def split(
    model: str,
    *,
    model_type: str,
    split_points: tuple[int, int],
    num_tokens: int,
    rounds: int,
) -> dict[str, Any]:
    """Load and run a model cut before the layers `split_points`; return figures, and a digest of the logits."""
    began_s = time.perf_counter()
    bottom, trunk, top = ModelFactory.create_split_models(model_type, model, *split_points, device="cpu")
    load_s = time.perf_counter() - began_s
    vocab_size = bottom.model.config.vocab_size
    input_ids = torch.arange(num_tokens)[None] * 7 % vocab_size
    seconds = []
    with torch.no_grad():
        for _ in range(rounds + 1):
            began_s = time.perf_counter()
            logits = top(trunk(bottom(input_ids)))
            seconds.append(time.perf_counter() - began_s)
    # The first pass warms up.
    return {
        "load_s": load_s,
        "tokens_per_s": num_tokens / median(seconds[1:]),
        "num_bytes": bottom.size_bytes + trunk.size_bytes + top.size_bytes,
        "logits": digest_of(logits),
    }
