"""Layers whose last tokens a whole port decodes, and captures of such ports, which no model ran for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.diagnosis.evaluation import Evaluation, with_given
from compare.diagnosis.expert_pass import LayerWeights
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.model_runs.cached_attention import DecodedInputs
from compare.sides.golden_weights import CheckpointWeights
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.passes import PASSES_NAME, CachePair, ModelPasses
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.capture.writer import open_capture
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.json_codec import encode
from minimax_tools.model.run import model_run
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec

OpenLayer = Callable[..., Evaluation]
WritePort = Callable[..., Sides]
# Keys and values of a prompt's tokens, [2,K,n,D]; of all prompts, [2,B,K,S,D].
Entries = torch.Tensor
# From the right entries of a prompt, the number of prefilled ones, and the step: the entries that it attends to.
Read = Callable[[Entries, int, int], Entries]


@pytest.fixture(scope="session")
def open_layer(toy: Path) -> OpenLayer:
    """Opens layer 1 of the toy on random input, cut into more and smaller heads; the chosen tokens are decoded."""
    spec = replace(
        ModelSpec.from_folder(toy), num_attention_heads=16, num_key_value_heads=4, head_dim=32, rotary_dim=16
    )
    weights = LayerWeights(LayerTensors.open(CheckpointReader(toy), spec, 1, torch.bfloat16))

    def open_layer(
        mask: torch.Tensor, *, num_decoded: int, chunks: Sequence[Sequence[int]] = ()
    ) -> Evaluation:
        passes = ModelPasses(num_passes=1 + num_decoded, chunks=tuple(map(tuple, chunks)))
        numbers = passes.number_tokens(mask)
        inputs = DecodedInputs(
            spec=spec,
            weights=weights,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            decode_start=mask.shape[1],
            numbers=numbers,
            caches={},
            padding={},
        )
        states = torch.randn(*mask.shape, spec.hidden_size, generator=torch.Generator().manual_seed(0))
        return Evaluation(
            inputs, with_given({Site.INPUT: states}), tokens=(numbers > 0).flatten().nonzero().flatten()
        )

    return open_layer


@pytest.fixture
def write_port(golden: Path, toy: Path, tmp_path: Path) -> WritePort:
    """Writes what a whole port shows of some layers, and what its caches hold; returns it beside the golden."""
    source = Capture.open(golden)

    def write(
        layers: Mapping[int, tuple[Mapping[Site, torch.Tensor], CachePair | None]],
        *,
        num_decoded: int = 2,
        **passes: Any,
    ) -> Sides:
        run = model_run(4, sites_level="all", num_decoded=num_decoded)
        description = replace(
            source.description, side=DEVICE_SIDE, run=run, noise_floor="off", floor_variants=()
        )
        cached = tuple(layer for layer, (_, cache) in layers.items() if cache is not None)
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        with open_capture(folder, description, inputs=source.read_inputs()) as writer:
            for layer, (tensors, cache) in layers.items():
                writer.write_layer(layer, tensors, cache=cache)
            told = ModelPasses(num_passes=1 + num_decoded, cached_layers=cached, **passes)
            writer.write_json(PASSES_NAME, encode(told))
        target = Capture.open(folder)
        return Sides(
            reference=source,
            target=target,
            batch=Batch.of(source, target),
            criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
            weights=CheckpointWeights(model=str(toy)),
        )

    return write


@pytest.fixture(scope="session")
def stepped() -> Callable[..., torch.Tensor]:
    """Computes attention of decoded tokens [T,N·D] as a port does, prompt by prompt and step by step."""
    return _step


def _step(
    queries: torch.Tensor,
    right: Entries,
    mask: torch.Tensor,
    read: Read,
    *,
    num_decoded: int,
    past: Entries | None = None,
) -> torch.Tensor:
    """Let each decoded token attend to what it reads; `past` are cached entries, if they are not the right ones.

    Queries are [B,N,S,D], the mask [B,S]. A token's own entry is right.
    """
    contexts = []
    for row, is_real in enumerate(mask.bool()):
        own = right[:, row][:, :, is_real]
        held = own if past is None else past[:, row][:, :, is_real]
        num_prefilled = int(is_real.sum()) - num_decoded
        for step in range(1, num_decoded + 1):
            place = num_prefilled + step - 1
            seen = torch.cat((held[:, :, :place], own[:, :, place:]), dim=2)
            query = queries[row][:, is_real][:, place]
            keys, values = read(seen, num_prefilled, step).repeat_interleave(len(query) // len(own[0]), dim=1)
            scores = (keys @ query[..., None])[..., 0] * query.shape[-1] ** -0.5
            contexts.append((scores.softmax(-1)[..., None] * values).sum(1).flatten())
    return torch.stack(contexts)
