"""Inputs of the probes that run a model, and a digest of their logits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs


def open_inputs(folder: Path, seq_lens: list[int]) -> tuple[ModelSpec, Inputs]:
    """Return the model's quantities, and rows of random tokens of these lengths."""
    spec = ModelSpec.from_folder(folder)
    return spec, build_inputs(InputRequest(seq_lens=tuple(seq_lens)), folder=folder, spec=spec)


def digest_of(logits: torch.Tensor) -> str:
    """Compute a digest of the logits' shape and bits."""
    bits = logits.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(json.dumps(list(logits.shape)).encode() + bits).hexdigest()
