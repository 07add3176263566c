"""ProbeResult in a process of their own: the same model loaded and run by transformers and accelerate alone.

Every function returns numbers and digests by name; see `loading/probe.py`. Nothing of mm2 is imported before torch:
what it settles for its own command must not settle how these run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import accelerate.hooks
import numpy.ctypeslib
import torch
import transformers.integrations.moe
import transformers.masking_utils
from transformers import MiniMaxM2ForCausalLM
from transformers.utils import logging as transformers_logging

# isort: split
from gpu_reference.model.model import restore_router
from loading.inputs import digest_of, open_inputs
from minimax_tools.checkpoint.reader import CheckpointReader

transformers_logging.disable_progress_bar()
# Else they would be imported while memory and time are measured.
_IMPORTED_EARLY = (
    accelerate.hooks,
    numpy.ctypeslib,
    transformers.integrations.moe,
    transformers.masking_utils,
)


def forward_offloaded(model: str, seq_lens: list[int], offload_folder: str) -> dict[str, Any]:
    """The logits by accelerate's disk offload, from the folder on: every layer on disk, all else in memory."""
    folder = Path(model)
    spec, inputs = open_inputs(folder, seq_lens)
    device_map = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    } | {f"model.layers.{layer}": "disk" for layer in range(spec.num_hidden_layers)}
    began_s = time.perf_counter()
    whole = MiniMaxM2ForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
        device_map=device_map,
        offload_folder=offload_folder,
    ).eval()
    load_s = time.perf_counter() - began_s
    with CheckpointReader(folder) as reader:
        # It rounds the router; with the checkpoint's own, the logits must be the streamed ones bit for bit.
        restore_router(whole, reader)
    began_s = time.perf_counter()
    with torch.no_grad():
        logits = whole(**inputs.tensors(), use_cache=False).logits
    forward_s = time.perf_counter() - began_s
    return {
        "whole_s": load_s + forward_s,
        "load_s": load_s,
        "forward_s": forward_s,
        "logits": digest_of(logits),
    }


def load_whole(model: str) -> dict[str, float]:
    """transformers' `from_pretrained`, as anyone calls it."""
    began_s = time.perf_counter()
    whole = MiniMaxM2ForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    return {"load_s": time.perf_counter() - began_s, "num_parameters": whole.num_parameters()}
