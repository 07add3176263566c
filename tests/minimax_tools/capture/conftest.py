"""Descriptions and inputs of captures that no model made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.model.inputs import Inputs, pad_rows
from minimax_tools.model.run import Run, multi_layer_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.provenance import ModelFingerprint, Provenance

Describe = Callable[..., Description]


@pytest.fixture
def inputs() -> Inputs:
    return pad_rows([[5, 6, 7], [8, 9]], padding_side="right", buckets=(), pad_token_id=0, source="a test")


@pytest.fixture
def describe(inputs: Inputs) -> Describe:
    """Makes the description of a run of three chained layers, unless told otherwise."""

    def make(*, run: Run | None = None, noise_floor: str = "off", target: str = "builtin") -> Description:
        return Description(
            side="neuron",
            run=run or multi_layer_run(Span(0, 3), sites_level="layer"),
            provenance=Provenance(
                model=ModelFingerprint(spec_digest="0" * 64, tensors_digest="1" * 64, layers={0: "2" * 64}),
                model_source="/models/MiniMax-M2",
                backend="cpu",
                device="cpu",
                dtypes={"weights": "bfloat16"},
                target=target,
                options={"attn_implementation": "sdpa", "proved": ["a", "b"]},
            ),
            inputs_digest=inputs.digest(),
            input_source=inputs.source,
            noise_floor=noise_floor,
        )

    return make


@pytest.fixture
def layer_of() -> Callable[[int], dict[Site, torch.Tensor]]:
    """Makes the tensors of a layer, other numbers for every layer."""

    def make(layer: int) -> dict[Site, torch.Tensor]:
        first = {Site.INPUT: torch.full((2, 3, 4), -1.0).bfloat16()} if layer == 0 else {}
        return {**first, Site.OUTPUT: torch.arange(24.0).reshape(2, 3, 4).bfloat16() + layer}

    return make
