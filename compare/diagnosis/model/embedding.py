"""Mistakes of the embedding: which row of the table a token gets, and in which form.

`predict(inputs, correct, **parameters)` of a mistake gets the port's inputs, the correct embedding [T,H], and one of
its `candidates`. It returns what a port with the mistake gives, float32 [T,H], NaN at tokens that it cannot tell; None
if a weight is not held. T tokens, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from compare.diagnosis.catalogue.fp8 import ROUNDINGS, rounding_dtypes
from compare.diagnosis.mistake import each
from compare.diagnosis.model import shards
from compare.diagnosis.model.mistake import ModelInputs, ModelMistake
from minimax_tools.model.sites import ModelSite


def embed(inputs: ModelInputs) -> torch.Tensor:
    """Look up the tokens' rows, float32 [T,H]."""
    return _rows(inputs, inputs.token_ids)


def _rows(inputs: ModelInputs, ids: torch.Tensor) -> torch.Tensor:
    return inputs.weights.embedding[ids].float()


def _by_rows(other_rows: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Build a `predict` that looks up other rows, which a function of `shards` gives for the token ids, int64 [T]."""
    return lambda inputs, _, **parameters: _rows(
        inputs, other_rows(inputs.token_ids, inputs.spec.vocab_size, **parameters)
    )


def _offset_of_rank_0(inputs: ModelInputs, correct: torch.Tensor, *, tp_degree: int) -> torch.Tensor:
    """Look tokens up on ranks that all subtract 0, rank 0's first row, and keep the ids below their number of rows.

    So each rank answers rank 0's tokens from its own rows, and other tokens with zeros; the all-reduce adds these up.
    """
    num_rows = inputs.spec.vocab_size // tp_degree
    summed = torch.zeros_like(correct)
    is_of_rank_0 = inputs.token_ids < num_rows
    for rank in range(tp_degree):
        summed[is_of_rank_0] += _rows(inputs, rank * num_rows + inputs.token_ids[is_of_rank_0])
    return summed


def _columns_of_rank_0(_: ModelInputs, correct: torch.Tensor, *, tp_degree: int) -> torch.Tensor:
    return correct[:, : correct.shape[1] // tp_degree].repeat(1, tp_degree)


def _columns_not_gathered(
    _: ModelInputs, correct: torch.Tensor, *, tp_degree: int, rank: int
) -> torch.Tensor:
    hidden = correct.shape[1]
    return correct * shards.is_of_rank(torch.arange(hidden), hidden, tp_degree, rank)


def _usual_factors(inputs: ModelInputs) -> tuple[float, float]:
    root = math.sqrt(inputs.spec.hidden_size)
    return root, 1.0 / root


_mistake = partial(ModelMistake, site=ModelSite.EMBEDDING)
EMBEDDING_MISTAKES = (
    _mistake(
        name="embedding_shard_of_rank_0",
        what="Every rank looks tokens up in rank 0's rows of the vocabulary.",
        look_at="where the rank that chooses the shard comes from: a Python constant is baked into the graph",
        predict=_by_rows(shards.within_first_shard),
        candidates=shards.vocabulary_degrees,
    ),
    _mistake(
        name="embedding_offset_of_rank_0",
        what="Every rank masks tokens by rank 0's range: these tokens get the sum of one row of each rank, others 0.",
        look_at="the index of the rank's first row, which is subtracted from token ids",
        predict=_offset_of_rank_0,
        candidates=shards.vocabulary_degrees,
    ),
    _mistake(
        name="embedding_not_reduced",
        what="The ranks' parts of the vocabulary are not added up: tokens of other ranks are zero.",
        look_at="the all-reduce behind the vocabulary-parallel embedding",
        predict=lambda inputs, correct, **split: (
            correct * shards.is_of_rank(inputs.token_ids, inputs.spec.vocab_size, **split).unsqueeze(1)
        ),
        candidates=shards.vocabulary_ranks,
    ),
    _mistake(
        name="embedding_shards_exchanged",
        what="The vocabulary's shards are in another order.",
        look_at="the order in which ranks' rows of the embedding are cut and put together",
        predict=_by_rows(shards.reordered),
        candidates=shards.vocabulary_orders,
    ),
    _mistake(
        name="embedding_rows_shifted",
        what="Tokens get the rows of other tokens, a fixed number of rows away.",
        look_at="special tokens or padding rows in front of the table",
        predict=_by_rows(shards.shifted),
        candidates=shards.shifts,
    ),
    _mistake(
        name="embedding_columns_of_rank_0",
        what="Every rank gives rank 0's hidden channels.",
        look_at="the rank that chooses the columns of the embedding",
        predict=_columns_of_rank_0,
        candidates=shards.hidden_degrees,
    ),
    _mistake(
        name="embedding_columns_not_gathered",
        what="One rank's hidden channels are there, the others are zero.",
        look_at="the all-gather behind the embedding",
        predict=_columns_not_gathered,
        candidates=shards.hidden_ranks,
    ),
    _mistake(
        name="embedding_scaled",
        what="Embeddings are multiplied by a factor, as other models do by the root of the hidden size.",
        look_at="a scale behind the embedding",
        # Only a product is rounded again: the other predictions are values of the table, which has the dtype.
        predict=lambda inputs, correct, factor: inputs.rounded(correct * factor),
        # Beside these two, the factor that fits the port best is tried.
        candidates=each("factor", _usual_factors),
        fits_factor=True,
    ),
    _mistake(
        name="embedding_is_head",
        what="Tokens are looked up in lm_head.",
        look_at="a tie of embedding and lm_head: MiniMax-M2 does not tie them",
        predict=lambda inputs, _: (
            inputs.weights.head[inputs.token_ids].float() if inputs.weights.has_head else None
        ),
        sources=("parallax#444",),
    ),
    _mistake(
        name="embedding_low_precision",
        what="The embedding is held in fewer bits than the checkpoint's.",
        look_at="the list of modules that quantisation leaves alone",
        predict=lambda _, correct, dtype: ROUNDINGS[dtype](correct),
        candidates=rounding_dtypes,
    ),
    _mistake(
        name="embedding_of_token_before",
        what="Each position has the embedding of the token before it.",
        look_at="a shift of the token ids, such as that of labels in training",
        # `previous` are indices among all real tokens; -1 of a prompt's first token, which becomes NaN.
        predict=lambda inputs, _: inputs.without_first_tokens(
            _rows(inputs, inputs.all_token_ids[inputs.previous])
        ),
    ),
    _mistake(
        name="embedding_tokens_exchanged",
        what="Tokens have the embedding of other tokens of their pass.",
        look_at="a transpose or reshape of the token ids [B,S] or of the embedding, or the order of the batch's rows",
        predict=lambda inputs, _, order: inputs.of_others(_rows(inputs, inputs.all_token_ids), order),
        candidates=each("order", lambda inputs: inputs.exchanged),
    ),
    _mistake(
        name="embedding_zero",
        what="The embedding is zero.",
        look_at="whether the tensor was loaded at all",
        predict=lambda _, correct: torch.zeros_like(correct),
    ),
)
