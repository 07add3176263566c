"""Mistakes of the head, on the port's own output of the final norm.

T tokens, V the vocabulary, C judged columns of it, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from compare.diagnosis.mistake import values_of
from compare.diagnosis.model import shards
from compare.diagnosis.model.low_precision import ROUNDINGS, roundings
from compare.diagnosis.model.mistake import ModelMistake
from compare.diagnosis.model.scene import ModelScene
from minimax_tools.model.sites import ModelSite
from minimax_tools.reference.float32_stages import normalise


def score(scene: ModelScene) -> torch.Tensor:
    """Compute the right logits of the judged columns, float32 [T,C]; the head's input must be held."""
    return score_states(scene, _normed(scene))


def score_states(scene: ModelScene, states: torch.Tensor) -> torch.Tensor:
    """Compute the logits of the judged columns, float32 [T,C], from any states [T,H]."""
    return states @ _rows(scene, scene.columns).T


def _rows(scene: ModelScene, rows: torch.Tensor) -> torch.Tensor:
    return scene.weights.head[rows].float()


def _normed(scene: ModelScene) -> torch.Tensor:
    assert scene.normed is not None, "the search asks for predictions where the head's input is held"
    return scene.normed


def _by_rows(other_rows: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compute logits from the rows that `other_rows` gives in place of the right ones."""
    return lambda scene, _, **parameters: (
        _normed(scene) @ _rows(scene, other_rows(scene.columns, scene.spec.vocab_size, **parameters)).T
    )


def _exchanged(columns: torch.Tensor, vocab_size: int, rows: str) -> torch.Tensor:
    return (columns ^ 1).clamp(max=vocab_size - 1) if rows == "neighbours" else vocab_size - 1 - columns


def _transposed(scene: ModelScene, _: torch.Tensor) -> torch.Tensor:
    """Read the table's memory [V,H] as [H,V]."""
    starts = torch.arange(scene.spec.hidden_size) * scene.spec.vocab_size
    return _normed(scene) @ scene.weights.head.flatten()[starts[:, None] + scene.columns].float()


def _of_the_embedding(scene: ModelScene, _: torch.Tensor) -> torch.Tensor | None:
    if not scene.weights.has_head:
        return None
    return _normed(scene) @ scene.weights.embedding[scene.columns].float().T


def _low_precision(scene: ModelScene, _: torch.Tensor, *, dtype: str) -> torch.Tensor:
    return _normed(scene) @ ROUNDINGS[dtype](_rows(scene, scene.columns)).T


def _normed_twice(scene: ModelScene, _: torch.Tensor) -> torch.Tensor:
    twice = normalise(_normed(scene), scene.weights.norm, scene.spec.rms_norm_eps)
    return score_states(scene, scene.rounded(twice))


def _of_token_before(scene: ModelScene, _: torch.Tensor) -> torch.Tensor:
    assert scene.all_normed is not None, "the search asks for predictions where the head's input is held"
    return scene.but_first(score_states(scene, scene.all_normed[scene.before]))


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
        predict=lambda scene, right, **split: (
            right * shards.is_of_rank(scene.columns, scene.spec.vocab_size, **split)
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
        predict=lambda scene, _: None if scene.states is None else score_states(scene, scene.states),
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
        name="head_scaled",
        what="Logits are multiplied by a factor.",
        look_at="a temperature or a scale of logits",
        predict=lambda _, right, factor: right * factor,
        candidates=lambda _: (),
        fits_factor=True,
    ),
    _mistake(
        name="head_low_precision",
        what="lm_head is held in fewer bits than the checkpoint's.",
        look_at="the list of modules that quantisation leaves alone",
        predict=_low_precision,
        candidates=roundings,
    ),
    _mistake(
        name="head_zero",
        what="All logits are zero.",
        look_at="whether lm_head was loaded at all",
        predict=lambda _, right: torch.zeros_like(right),
        sources=("parallax#444",),
    ),
)
