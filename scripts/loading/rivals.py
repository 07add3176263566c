"""Probes of transformers and accelerate, which load and run the same model.

A probe is a function that `loading/probe.py` calls in a process of its own; it returns numbers and digests by name.
Imports that are not used (F401) are those that the libraries make while they run, where they would count in time and
memory. torch is imported before mm2, so that it does not see the OMP_WAIT_POLICY that `gpu_reference` sets.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import accelerate.hooks  # noqa: F401
import numpy.ctypeslib  # noqa: F401
import torch
import transformers.integrations.moe
import transformers.masking_utils  # noqa: F401
from transformers import MiniMaxM2ForCausalLM
from transformers.utils import logging as transformers_logging

# isort: split
from gpu_reference.model.model import restore_router
from loading.reads import digest_of, open_inputs
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec

transformers_logging.disable_progress_bar()


def forward_offloaded(model: str, seq_lens: list[int], offload_folder: str) -> dict[str, Any]:
    """Compute the logits by accelerate's disk offload: layers on disk, the other weights in memory."""
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
        # transformers rounds the router's weights. With the checkpoint's, the logits equal the streamed ones.
        restore_router(whole, reader, ModelSpec.from_folder(folder))
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
    """Load the model by transformers' `from_pretrained`, with its defaults."""
    began_s = time.perf_counter()
    whole = MiniMaxM2ForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    return {"load_s": time.perf_counter() - began_s, "num_parameters": whole.num_parameters()}
