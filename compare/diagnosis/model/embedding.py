"""Mistakes of the embedding: which row of the table a token gets, and in which form.

T tokens, V the vocabulary, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import MappingProxyType

import torch

from compare.diagnosis.mistake import Parameters
from compare.diagnosis.model import shards
from compare.diagnosis.model.low_precision import ROUNDINGS, roundings
from compare.diagnosis.model.mistake import ModelMistake
from compare.diagnosis.model.scene import ModelScene, fit_factor
from minimax_tools.model.sites import ModelSite


def embed(scene: ModelScene) -> torch.Tensor | None:
    """Look up the tokens' rows, float32 [T,H]; None where the tokens are not known."""
    return None if scene.token_ids is None else _rows(scene, scene.token_ids)


def _rows(scene: ModelScene, ids: torch.Tensor) -> torch.Tensor:
    return scene.weights.embedding[ids].float()


def _ids(scene: ModelScene) -> torch.Tensor:
    assert scene.token_ids is not None, "the search asks for predictions where the tokens are known"
    return scene.token_ids


def _by_rows(other_rows: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Look up the rows that `other_rows` gives in place of the right ones."""
    return lambda scene, **parameters: _rows(
        scene, other_rows(_ids(scene), scene.spec.vocab_size, **parameters)
    )


def _offset_of_rank_0(scene: ModelScene, *, tp_degree: int) -> torch.Tensor:
    num_rows = scene.spec.vocab_size // tp_degree
    ids = _ids(scene)
    found = torch.zeros(len(ids), scene.spec.hidden_size)
    first = ids < num_rows
    for rank in range(tp_degree):
        found[first] += _rows(scene, rank * num_rows + ids[first])
    return found


def _not_reduced(scene: ModelScene, *, tp_degree: int, rank: int) -> torch.Tensor:
    is_own = _ids(scene) // (scene.spec.vocab_size // tp_degree) == rank
    return _rows(scene, _ids(scene)) * is_own[:, None]


def _columns_of_rank_0(scene: ModelScene, *, tp_degree: int) -> torch.Tensor:
    rows = _rows(scene, _ids(scene))
    return rows[:, : scene.spec.hidden_size // tp_degree].repeat(1, tp_degree)


def _columns_not_gathered(scene: ModelScene, *, tp_degree: int, rank: int) -> torch.Tensor:
    rows = _rows(scene, _ids(scene))
    is_own = torch.arange(scene.spec.hidden_size) // (scene.spec.hidden_size // tp_degree) == rank
    return rows * is_own


def _scaled(scene: ModelScene, *, factor: float) -> torch.Tensor:
    return scene.rounded(_rows(scene, _ids(scene)) * factor)


def _factors(scene: ModelScene, port: torch.Tensor) -> tuple[Parameters, ...]:
    """List the usual factors, and the one that fits best."""
    root = math.sqrt(scene.spec.hidden_size)
    right = _rows(scene, _ids(scene))
    fitted = fit_factor(port, right)
    return tuple(MappingProxyType({"factor": factor}) for factor in (root, 1.0 / root, fitted) if factor)


def _of_the_head(scene: ModelScene) -> torch.Tensor | None:
    return scene.weights.head[_ids(scene)].float() if scene.weights.has_head else None


def _low_precision(scene: ModelScene, *, dtype: str) -> torch.Tensor:
    return ROUNDINGS[dtype](_rows(scene, _ids(scene)))


def _token_before(scene: ModelScene) -> torch.Tensor | None:
    if scene.before is None or scene.all_ids is None:
        return None
    rows = _rows(scene, scene.all_ids[scene.before])
    # The values of a prompt's first token are not known.
    return rows.masked_fill((scene.before < 0)[:, None], math.nan)


def _zeros(scene: ModelScene) -> torch.Tensor:
    return torch.zeros(len(_ids(scene)), scene.spec.hidden_size)


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
        what="Every rank masks tokens by rank 0's range: its tokens get the sum of all shards, the others nothing.",
        look_at="the first row that is subtracted from token ids on each rank",
        predict=_offset_of_rank_0,
        candidates=shards.vocabulary_degrees,
    ),
    _mistake(
        name="embedding_not_reduced",
        what="The ranks' parts of the vocabulary are not added up: tokens of other ranks are zero.",
        look_at="the all-reduce behind the vocabulary-parallel embedding",
        predict=_not_reduced,
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
        predict=_scaled,
        candidates=_factors,
    ),
    _mistake(
        name="embedding_is_head",
        what="Tokens are looked up in lm_head.",
        look_at="a tie of embedding and lm_head: MiniMax-M2 does not tie them",
        predict=_of_the_head,
        sources=("parallax#444",),
    ),
    _mistake(
        name="embedding_low_precision",
        what="The embedding is held in fewer bits than the checkpoint's.",
        look_at="the list of modules that quantisation leaves alone",
        predict=_low_precision,
        candidates=roundings,
    ),
    _mistake(
        name="embedding_of_token_before",
        what="Each position has the embedding of the token before it.",
        look_at="a shift of the token ids, such as that of labels in training",
        predict=_token_before,
    ),
    _mistake(
        name="embedding_zero",
        what="The embedding is zero.",
        look_at="whether the tensor was loaded at all",
        predict=_zeros,
    ),
)
