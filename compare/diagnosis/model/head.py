"""Mistakes of the head, on the port's own output of the final norm.

`predict(inputs, correct, **parameters)` of a mistake gets the port's inputs, the correct logits on them [T,C], and one
of its `candidates`; it returns what a port with the mistake gives, [T,C].
T tokens, V rows of the vocabulary, C judged ones among them, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from compare.diagnosis.catalogue.fp8 import ROUNDINGS, rounding_dtypes
from compare.diagnosis.mistake import each, values_of
from compare.diagnosis.model import shards
from compare.diagnosis.model.mistake import ModelInputs, ModelMistake
from minimax_tools.model.sites import ModelSite
from minimax_tools.reference.float32_stages import normalise


def score(inputs: ModelInputs) -> torch.Tensor:
    """Compute the correct logits of the judged columns, float32 [T,C]; the head's input must be held."""
    return score_states(inputs, _normed(inputs))


def score_states(inputs: ModelInputs, states: torch.Tensor) -> torch.Tensor:
    """Compute the logits of the judged columns, float32 [T,C], from any states [T,H]."""
    return states @ _rows(inputs, inputs.columns).T


def _rows(inputs: ModelInputs, rows: torch.Tensor) -> torch.Tensor:
    return inputs.weights.head[rows].float()


def _normed(inputs: ModelInputs) -> torch.Tensor:
    """Return the head's input, the output of the final norm, [T,H]."""
    assert inputs.normed is not None, "the search asks for predictions only if the head's input is held"
    return inputs.normed


def _by_rows(other_rows: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Build a `predict` that reads the head's rows `other_rows(columns, vocab_size, **parameters)`, not `columns`."""
    return lambda inputs, _, **parameters: (
        _normed(inputs) @ _rows(inputs, other_rows(inputs.columns, inputs.spec.vocab_size, **parameters)).T
    )


def _exchanged(columns: torch.Tensor, vocab_size: int, rows: str) -> torch.Tensor:
    """Map rows [C]: with `neighbours` 0 and 1, 2 and 3 change places; with `all reversed` the last comes first."""
    return (columns ^ 1).clamp(max=vocab_size - 1) if rows == "neighbours" else vocab_size - 1 - columns


def _transposed(inputs: ModelInputs, _: torch.Tensor) -> torch.Tensor:
    """Read the table's memory [V,H] as [H,V]."""
    starts = torch.arange(inputs.spec.hidden_size) * inputs.spec.vocab_size
    return _normed(inputs) @ inputs.weights.head.flatten()[starts[:, None] + inputs.columns].float()


def _of_the_embedding(inputs: ModelInputs, _: torch.Tensor) -> torch.Tensor | None:
    if not inputs.weights.has_head:
        return None  # tied: the embedding is the head
    return _normed(inputs) @ inputs.weights.embedding[inputs.columns].float().T


def _low_precision(inputs: ModelInputs, _: torch.Tensor, *, dtype: str) -> torch.Tensor:
    return _normed(inputs) @ ROUNDINGS[dtype](_rows(inputs, inputs.columns)).T


def _normed_twice(inputs: ModelInputs, _: torch.Tensor) -> torch.Tensor:
    twice = normalise(_normed(inputs), inputs.weights.final_norm, inputs.spec.rms_norm_eps)
    return score_states(inputs, inputs.rounded(twice))


def _of_other_tokens(inputs: ModelInputs, _: torch.Tensor, *, order: str) -> torch.Tensor:
    assert inputs.all_normed is not None, "the search asks for predictions only if the head's input is held"
    return score_states(inputs, inputs.of_others(inputs.all_normed, order))


def _of_token_before(inputs: ModelInputs, _: torch.Tensor) -> torch.Tensor:
    assert inputs.all_normed is not None, "the search asks for predictions only if the head's input is held"
    return inputs.without_first_tokens(score_states(inputs, inputs.all_normed[inputs.previous]))


_mistake = partial(ModelMistake, site=ModelSite.LOGITS)
HEAD_MISTAKES = (
    _mistake(
        name="head_shard_of_rank_0",
        what="Every rank computes the logits of rank 0's rows of the vocabulary.",
        look_at="where the rank that chooses lm_head's shard comes from: a Python constant is baked into the graph",
        predict=_by_rows(shards.within_first_shard),
        candidates=shards.vocabulary_degrees,
    ),
    _mistake(
        name="head_shards_exchanged",
        what="The vocabulary's shards are put together in another order.",
        look_at="the order in which ranks' logits are gathered",
        predict=_by_rows(shards.reordered),
        candidates=shards.vocabulary_orders,
    ),
    _mistake(
        name="head_not_gathered",
        what="One rank's logits are there, the others are zero.",
        look_at="the all-gather behind lm_head",
        predict=lambda inputs, correct, **split: (
            correct * shards.is_of_rank(inputs.columns, inputs.spec.vocab_size, **split)
        ),
        candidates=shards.vocabulary_ranks,
    ),
    _mistake(
        name="head_is_embedding",
        what="Logits are computed with the embedding.",
        look_at="tie_word_embeddings: MiniMax-M2 has a head of its own",
        predict=_of_the_embedding,
        sources=("parallax#444",),
    ),
    _mistake(
        name="head_rows_shifted",
        what="Each token has the logit of another, a fixed number of rows away.",
        look_at="special tokens or padding rows in front of lm_head",
        predict=_by_rows(shards.shifted),
        candidates=shards.shifts,
    ),
    _mistake(
        name="head_rows_exchanged",
        what="Rows of lm_head are exchanged.",
        look_at="the order of lm_head's rows",
        predict=_by_rows(_exchanged),
        candidates=values_of("rows", "neighbours", "all reversed"),
    ),
    _mistake(
        name="head_transposed",
        what="The memory of lm_head is read as if it were transposed.",
        look_at="a reshape of lm_head's weight where a transpose was meant",
        predict=_transposed,
    ),
    _mistake(
        name="head_without_norm",
        what="The head reads the last layer's output, without the final norm.",
        look_at="what lm_head is called with",
        predict=lambda inputs, _: None if inputs.states is None else score_states(inputs, inputs.states),
    ),
    _mistake(
        name="head_normed_twice",
        what="The final norm is applied once more before the head.",
        look_at="what lm_head is called with",
        predict=_normed_twice,
    ),
    _mistake(
        name="head_of_token_before",
        what="Each position has the logits of the token before it.",
        look_at="the row that is gathered for sampling, or a shift of labels",
        predict=_of_token_before,
    ),
    _mistake(
        name="head_tokens_exchanged",
        what="Tokens have the logits of other tokens of their pass.",
        look_at="a transpose or reshape of [B,S,H] or of the logits, or the order of the batch's rows",
        predict=_of_other_tokens,
        candidates=each("order", lambda inputs: inputs.exchanged),
    ),
    _mistake(
        name="head_scaled",
        what="Logits are multiplied by a factor.",
        look_at="a temperature or a scale of logits",
        predict=lambda _, correct, factor: correct * factor,
        candidates=lambda _: (),  # only the factor that fits the port best
        fits_factor=True,
    ),
    _mistake(
        name="head_low_precision",
        what="lm_head is held in fewer bits than the checkpoint's.",
        look_at="the list of modules that quantisation leaves alone",
        predict=_low_precision,
        candidates=rounding_dtypes,
    ),
    _mistake(
        name="head_zero",
        what="All logits are zero.",
        look_at="whether lm_head was loaded at all",
        predict=lambda _, correct: torch.zeros_like(correct),
        sources=("parallax#444",),
    ),
)
