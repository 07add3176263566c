"""A chained run as vLLM Neuron's own writer dumps it.

The writer keeps the first output of each module: the router shows its logits and no choice of experts. The tokens of
all prompts follow each other, padded to a bucket. B prompts, S tokens of each, T tokens of all, F channels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.dumps.opening import DumpReading, open_sides
from minimax_tools.model.sites import ModelSite, Site

TOOL = "vllm_neuron"
# The number of tokens of a dump is rounded up to a multiple of it.
_BUCKET = 64
# Modules of a layer that the writer dumps, and the site that the first output of each is.
_MODULES = {
    "input_layernorm": Site.INPUT_NORM,
    "self_attn.q_proj": Site.Q_PROJ,
    "self_attn.k_proj": Site.K_PROJ,
    "self_attn.v_proj": Site.V_PROJ,
    "self_attn.q_norm": Site.Q_NORM,
    "self_attn.k_norm": Site.K_NORM,
    "self_attn.o_proj": Site.ATTN_DELTA,
    "post_attention_layernorm": Site.POST_NORM,
    "block_sparse_moe.gate": Site.ROUTER_LOGITS,
    "block_sparse_moe": Site.MOE_DELTA,
}


def dump_as_vllm_neuron(capture: Capture, golden: Capture, directory: Path) -> CaptureSource:
    """Write a run as vLLM Neuron would into a new directory, and open it as `mm2-compare` does.

    The run's rows are padded on the right. The dump has the batch of the golden.
    """
    mask = capture.read_attention_mask().bool()
    num_tokens = int(mask.sum())
    size = math.ceil(num_tokens / _BUCKET) * _BUCKET
    name = f"prefill_s{size}_0"
    for module, values in _shown_modules(capture):
        folder = directory / "dp0" / name / module
        folder.mkdir(parents=True)
        # A site's values are [B,S,F], but those of the router are [B·S,F]: padding is left out of both.
        tokens = values.unflatten(0, mask.shape)[mask] if values.ndim == 2 else values[mask]
        torch.save(_fill(tokens, size), folder / "rank0.pt")
    lengths = [int(row.sum()) for row in mask]
    positions = [position for length in lengths for position in range(length)]
    meta = {
        "req_ids": [str(row) for row in range(len(lengths))],
        "positions": positions + [0] * (size - num_tokens),
        "dp_rank": 0,
    }
    (directory / "dp0" / f"{name}_meta.json").write_text(json.dumps(meta))
    _, dump = open_sides(
        golden.directory, directory, reference_reading=DumpReading(), target_reading=DumpReading()
    )
    return dump


def _shown_modules(capture: Capture) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the modules that the writer shows, by name, with their values."""
    yield "model.embed_tokens", capture.read_model(ModelSite.EMBEDDING)
    for layer in capture.layers:
        sites = capture.sites(layer)
        for module, site in _MODULES.items():
            if site in sites:
                yield f"model.layers.{layer}.{module}", capture.read(layer, site)
        yield f"model.layers.{layer}", capture.read(layer, Site.OUTPUT)
    yield "model.norm", capture.read_model(ModelSite.FINAL_NORM)
    yield "lm_head", capture.read_model(ModelSite.LOGITS)


def _fill(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Pad tokens [T,F] with NaN at the end."""
    return torch.cat((tokens, tokens.new_full((size - len(tokens), tokens.shape[1]), float("nan"))))
