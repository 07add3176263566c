"""Tokens that the golden model generates, greedily or sampled, stored beside its activations."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu_reference.golden.sampling import Sampling
from gpu_reference.model.placement import input_device, watched_memory
from minimax_tools.capture.passes import NUM_LIKELIEST, Generation, Likely
from minimax_tools.model.inputs import Inputs, num_tokens_left
from minimax_tools.text.tokenizer import decode_if_possible

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def generate(model: PreTrainedModel, inputs: Inputs, sampling: Sampling, *, folder: Path) -> Generation:
    """Generate tokens after every row of `inputs`; `folder` has the tokenizer.

    Rows run one by one, without padding, and each starts from the seed, so that no row depends on another. A row ends
    when the model has no position left for a next token.
    """
    rows, likeliest = [], []
    for prompt, positions in zip(inputs.real_rows(), inputs.row_positions(), strict=True):
        keeper = _LikeliestKeeper()
        rows.append(_continue_row(model, prompt, positions, sampling, keeper))
        likeliest.append(keeper.likeliest)
    return Generation.of(
        inputs,
        rows,
        sampling=asdict(sampling),
        texts=decode_if_possible(folder, rows),
        # How close the second likeliest came says nothing about a token that was drawn.
        likeliest=() if sampling.do_sample else likeliest,
    )


class _LikeliestKeeper:
    """A logits processor that keeps the likeliest tokens of every step, and changes nothing."""

    def __init__(self) -> None:
        self.likeliest: list[tuple[Likely, ...]] = []

    def __call__(self, _: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # Rows run one by one: the batch is one row.
        values, tokens = logits[0].float().topk(min(NUM_LIKELIEST, logits.shape[-1]))
        self.likeliest.append(
            tuple(
                Likely(token=token, behind=behind)
                for token, behind in zip(tokens.tolist(), (values[0] - values).tolist(), strict=True)
            )
        )
        return logits


def _continue_row(
    model: PreTrainedModel,
    row: list[int],
    positions: list[int],
    sampling: Sampling,
    keeper: _LikeliestKeeper,
) -> list[int]:
    num_new_positions = num_tokens_left(positions[-1], model.config.max_position_embeddings)
    # Any, because transformers' types do not declare `generate`.
    generator: Any = model
    input_ids = torch.tensor([row], device=input_device(model))
    torch.manual_seed(sampling.seed)
    with torch.no_grad(), watched_memory(), warnings.catch_warnings():
        # A streamed model lies on the meta device between its layers; transformers takes that for its place.
        warnings.filterwarnings("ignore", r"You are calling \.generate\(\)", UserWarning)
        output = generator.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            # New tokens continue from the row's last position.
            position_ids=torch.tensor([positions], device=input_ids.device),
            max_new_tokens=min(sampling.max_new_tokens, num_new_positions),
            pad_token_id=0,
            # config.json says true, but the hub ships no MTP layer, which transformers would need.
            use_mtp=False,
            logits_processor=[keeper],
            **sampling.arguments(),
        )
    new_tokens: list[int] = output[0, len(row) :].tolist()
    return new_tokens
