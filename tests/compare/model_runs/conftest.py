"""A layer of the toy whose last tokens a whole port decodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compare.diagnosis.evaluation import Evaluation, with_given
from compare.diagnosis.layer_weights import LayerWeights
from compare.model_runs.cached_attention import DecodedInputs
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.inputs import decoded_tokens
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec

OpenLayer = Callable[..., Evaluation]


@pytest.fixture(scope="session")
def open_layer(toy: Path) -> OpenLayer:
    """Opens layer 1 of the toy on random input, cut into more and smaller heads; the chosen tokens are decoded."""
    spec = replace(
        ModelSpec.from_folder(toy), num_attention_heads=16, num_key_value_heads=4, head_dim=32, rotary_dim=16
    )
    weights = LayerWeights(LayerTensors.open(CheckpointReader(toy), spec, 1, torch.bfloat16))

    def open_layer(mask: torch.Tensor, *, num_decoded: int) -> Evaluation:
        is_decoded = decoded_tokens(mask, num_decoded, by_row=True)
        inputs = DecodedInputs(
            spec=spec,
            weights=weights,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            decode_start=mask.shape[1],
            is_decoded=is_decoded,
            caches={},
            padding={},
        )
        states = torch.randn(*mask.shape, spec.hidden_size, generator=torch.Generator().manual_seed(0))
        return Evaluation(
            inputs, with_given({Site.INPUT: states}), tokens=is_decoded.flatten().nonzero().flatten()
        )

    return open_layer
