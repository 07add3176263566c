"""Models, token rows and goldens that benchmarks measure against, all on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_reference.golden.golden import GoldenRequest, open_golden
from gpu_reference.model.model import GoldenModelRequest
from gpu_reference.model.placement import Placement
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.capture.writer import open_capture
from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import full_run, sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import Provenance
from minimax_tools.stored_dtype import dtype_name
from minimax_tools.synthetic.checkpoint import FP8, synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs
from minimax_tools.text.tokenizer import encode_texts

# Attention and experts of transformers: two implementations, which make two goldens of one model.
IMPLEMENTATIONS = (("sdpa", "grouped_mm"), ("eager", "eager"))
HELD_OUT_NAME = "held_out.txt"
# A model of as many layers as MiniMax-M2, each of them narrow.
NARROW = SyntheticModel(
    num_hidden_layers=62,
    hidden_size=128,
    num_attention_heads=4,
    head_dim=32,
    rotary_dim=16,
    num_local_experts=16,
    intermediate_size=64,
)

# One layer of true width; its experts are few and narrow, for their values have the layer's width whatever they are.
WIDE = SyntheticModel(
    num_hidden_layers=1,
    hidden_size=3072,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    rotary_dim=64,
    num_local_experts=8,
    intermediate_size=256,
    vocab_size=2048,
)


def write_model(folder: Path, model: SyntheticModel, *, dtype: torch.dtype = FP8, seed: int = 0) -> ModelSpec:
    """Write a synthetic checkpoint in one shard."""
    synthesize(folder, model=model, dtype=dtype, shard_size_bytes=None, seed=seed)
    return ModelSpec.from_folder(folder)


def request_text_rows(
    folder: Path, lengths: Sequence[int], *, seed: int, padding_side: str = "right"
) -> InputRequest:
    """Cut token rows of these lengths out of the held-out text of a trained model; `seed` chooses the place.

    Raises:
        CheckpointError: The model has no such text, or too little of it.
    """
    path = folder / HELD_OUT_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {HELD_OUT_NAME}", next_step="Name a model of scripts/train_models.py."
        )
    tokens = encode_texts(folder, [path.read_text(encoding="utf-8")], chat=False)[0]
    if len(tokens) < sum(lengths):
        raise CheckpointError(
            f"{path} is too short", expected=f"{sum(lengths)} tokens", found=str(len(tokens))
        )
    # A prime spreads small seeds over the text.
    start = seed * 7919 % (len(tokens) - sum(lengths) + 1)
    following = iter(tokens[start:])
    rows = tuple(",".join(map(str, itertools.islice(following, length))) for length in lengths)
    return InputRequest(input_ids=rows, padding_side=padding_side)


def request_golden(
    folder: Path,
    inputs: Inputs,
    *,
    noise_floor: str,
    sites_level: str = "all",
    dtype: torch.dtype = torch.bfloat16,
    attention: str = "sdpa",
    experts: str = "grouped_mm",
    floor_variants: tuple[str, ...] = (),
    streaming: Streaming | None = None,
) -> GoldenRequest:
    """Describe a golden run of transformers' whole model.

    Args:
        folder: Folder of the checkpoint.
        inputs: The token rows.
        noise_floor: `full`, `stats` or `off`.
        sites_level: `layer`, `component` or `all`.
        dtype: Dtype of weights and activations.
        attention: transformers' attention implementation.
        experts: transformers' experts implementation.
        floor_variants: Names of the variants that widen the noise floor.
        streaming: How layers are streamed; None holds the whole model in memory.
    """
    spec = ModelSpec.from_folder(folder)
    # A rank that runs a slice of a plan needs no layer behind its own.
    part = None if streaming is None else streaming.part
    return GoldenRequest(
        model=GoldenModelRequest(
            folder=folder,
            spec=spec,
            num_hidden_layers=spec.num_hidden_layers if part is None else part.stage.layers.stop,
            dtype=dtype,
            placement=Placement(device_map={"": "cpu"}),
            attn_implementation=attention,
            experts_implementation=experts,
        ),
        model_source=str(folder),
        run=full_run(spec.num_hidden_layers, sites_level=sites_level, graph=spec.graph),
        inputs=inputs,
        noise_floor=noise_floor,
        floor_variants=floor_variants,
        streaming=streaming,
    )


def capture_cpu_golden(folder: Path, directory: Path, *, rows: InputRequest, **options: Any) -> Capture:
    """Run transformers' model over token rows, and capture it in `directory`; `options` as for `request_golden`."""
    inputs = build_inputs(rows, folder=folder, spec=ModelSpec.from_folder(folder))
    with open_golden(request_golden(folder, inputs, **options)) as golden:
        golden.capture(directory, extra={})
    return Capture.open(directory)


def draw_golden(
    folder: Path, directory: Path, *, rows: InputRequest, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a golden whose layers' inputs are drawn, in `directory`: to time runs on layers that compute for minutes.

    It holds nothing else, so no run can be compared with it.
    """
    spec = ModelSpec.from_folder(folder)
    inputs, span = build_inputs(rows, folder=folder, spec=spec), Span(0, spec.num_hidden_layers)
    with CheckpointReader(folder) as reader:
        model = fingerprint_model(reader, spec, span)
    provenance = Provenance(
        model=model,
        model_source=str(folder),
        backend="cpu",
        device="none",
        dtypes={"weights": dtype_name(dtype)},
        target="drawn inputs",
    )
    description = Description(
        side=GOLDEN_SIDE,
        run=sweep_run(span, sites_level="layer"),
        provenance=provenance,
        inputs_digest=inputs.digest(),
        input_source="drawn",
    )
    generator = torch.Generator().manual_seed(0)
    with open_capture(directory, description, inputs=inputs) as writer:
        for layer in span:
            drawn = torch.randn((*inputs.batch_shape, spec.hidden_size), generator=generator)
            writer.write(layer, {Site.INPUT: drawn.to(dtype)})
        writer.finish()
