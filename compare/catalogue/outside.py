"""Mistakes outside the layers, at the embedding, the final norm and the logits, each a prediction of what a port gives.

T judged tokens, V the vocabulary, C judged columns of it, H hidden, F channels: H, or C at the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType

import torch

from compare.catalogue.candidates import (
    Parameters,
    degree_of,
    degrees,
    each,
    once,
    once_if,
    rank_of,
    values_of,
)
from compare.catalogue.low_bits import ROUNDINGS, rounding_dtypes
from compare.catalogue.words import Place, Words, read_words, words_of
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model import weight_names
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import head_name
from minimax_tools.reference.float32_stages import gain_of, normalise

_LAYER_NORMS = (weight_names.INPUT_NORM, weight_names.POST_NORM)


class ModelWeights:
    """Embedding, final norm, head, and norms of the layers; each is read once, when it is first asked for."""

    def __init__(self, reader: CheckpointReader, spec: ModelSpec, *, dtype: torch.dtype) -> None:
        self._reader = reader
        self._spec = spec
        self._dtype = dtype

    @cached_property
    def embedding(self) -> torch.Tensor:
        """The embedding, [V,H] in the golden's dtype; users make rows float32, since the table is large."""
        return self._reader.read_weight(weight_names.EMBEDDING, self._dtype)

    @cached_property
    def head(self) -> torch.Tensor:
        """The head, [V,H] in the golden's dtype; the embedding if the two are tied."""
        return (
            self._reader.read_weight(head_name(self._spec), self._dtype) if self.has_head else self.embedding
        )

    @property
    def has_head(self) -> bool:
        """True if the head is not tied to the embedding."""
        return not self._spec.tie_word_embeddings

    @cached_property
    def final_norm(self) -> torch.Tensor:
        """Factors of the final norm, [H]: float32, in which predictions are computed."""
        weight = self._reader.read_weight(weight_names.FINAL_NORM, self._dtype).float()
        return gain_of(self._spec.graph, weight)

    @cached_property
    def layer_norms(self) -> Mapping[str, torch.Tensor]:
        """Factors of the norms of layers, float32 [H], by names such as `2.input_layernorm`."""
        weights = {}
        for layer in range(self._spec.num_hidden_layers):
            for name in _LAYER_NORMS:
                hub_name = weight_names.layer_prefix(layer) + name
                if hub_name in self._reader.index.entries:
                    short_name = f"{layer}.{name.removesuffix('.weight')}"
                    weight = self._reader.read_weight(hub_name, self._dtype).float()
                    weights[short_name] = gain_of(self._spec.graph, weight)
        return weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelInputs:
    """Inputs of one side, the golden's or the port's, to the sites outside the layers; a tensor not held is None."""

    spec: ModelSpec
    weights: ModelWeights
    columns: torch.Tensor  # columns of the vocabulary that are judged, ascending: int64 [C]
    dtype: torch.dtype  # dtype that the golden computes in
    token_ids: torch.Tensor  # ids of the judged tokens, int64 [T]
    all_token_ids: torch.Tensor  # ids of all real tokens, int64
    previous: torch.Tensor  # index among all real tokens of the token before; -1 for none: int64 [T]
    # For a way to mistake tokens for others, in words: the other's index among all real tokens; -1 for none: int64 [T]
    exchanged: Mapping[str, torch.Tensor] = field(default_factory=dict)
    states: torch.Tensor | None = None  # output of the last layer, float32 [T,H]
    normed: torch.Tensor | None = None  # output of the final norm, float32 [T,H]
    all_normed: torch.Tensor | None = None  # output of the final norm for all real tokens, float32

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Round values to the golden's dtype; return them as float32."""
        return values.to(self.dtype).float()

    def of_others(self, values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return the values [T,F] of other tokens, int64 [T], from those of all real ones; NaN where there is none."""
        return values[others].masked_fill((others < 0)[:, None], math.nan)


# From the inputs to the parameters that are worth a try on them.
ModelCandidates = Callable[[ModelInputs], tuple[Parameters, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMistake:
    """A known mistake of the embedding, the final norm or the head.

    `predict` gets the port's own inputs, the correct values on them [T,F], and the parameters, by name. It returns the
    values of a port with the mistake, float32 [T,F], NaN at tokens that it cannot predict; None if an input is
    not held.
    """

    name: str
    site: ModelSite  # site at which the mistake is made
    predict: Callable[..., torch.Tensor | None]
    candidates: ModelCandidates = once
    fits_factor: bool = False  # whether the `factor` that fits the port best is tried beside the candidates

    @property
    def words(self) -> Words:
        """The mistake in words."""
        return words_of(self.name, Place.OUTSIDE)


# Orders of shards: the last rank's first; rank r holds every n-th row, from row r on, where a block was meant; and the
# reverse, rank r holds a block where every n-th row was meant.
_REVERSED, _STRIDED, _GATHERED_STRIDED = "reversed", "strided", "gathered strided"

# Candidates: a number of ranks that hold the vocabulary or the hidden channels, without and with one of these ranks.
_vocabulary_degrees = degree_of("tp_degree", "vocab_size")
_hidden_degrees = degree_of("tp_degree", "hidden_size")
_vocabulary_ranks = rank_of("tp_degree", "vocab_size")
_hidden_ranks = rank_of("tp_degree", "hidden_size")
_shifts = values_of("by", 1, -1, 2, -2, 3, -3, 4, -4, 8, -8, 16, -16)


def _vocabulary_orders(inputs: ModelInputs) -> tuple[Parameters, ...]:
    return tuple(
        MappingProxyType({"tp_degree": degree, "order": order})
        for degree in degrees(inputs.spec.vocab_size)
        for order in (_REVERSED, _STRIDED, _GATHERED_STRIDED)
    )


def _is_of_rank(rows: torch.Tensor, num_rows: int, tp_degree: int, rank: int) -> torch.Tensor:
    """Decide whether rows [C] of `num_rows` lie in a rank's shard, bool [C]."""
    return rows // (num_rows // tp_degree) == rank


def _within_first_shard(rows: torch.Tensor, vocab_size: int, tp_degree: int) -> torch.Tensor:
    """Map rows [C] to the rows of rank 0's shard with the same place in the shard."""
    return rows % (vocab_size // tp_degree)


def _reordered(rows: torch.Tensor, vocab_size: int, tp_degree: int, order: str) -> torch.Tensor:
    """Map rows [C] to the rows that stand in their place if shards are in another order."""
    num_rows = vocab_size // tp_degree
    if order == _REVERSED:
        return (tp_degree - 1 - rows // num_rows) * num_rows + rows % num_rows
    if order == _STRIDED:
        return (rows % num_rows) * tp_degree + rows // num_rows
    return (rows % tp_degree) * num_rows + rows // tp_degree


def _shifted(rows: torch.Tensor, vocab_size: int, by: int) -> torch.Tensor:
    """Map rows [C] to the rows `by` places later; after the last row comes the first."""
    return (rows + by) % vocab_size


_of_embedding, _of_final_norm, _of_head = (
    partial(ModelMistake, site=site) for site in (ModelSite.EMBEDDING, ModelSite.FINAL_NORM, ModelSite.LOGITS)
)


def embed(inputs: ModelInputs) -> torch.Tensor:
    """Look up the tokens' rows, float32 [T,H]."""
    return _embedded(inputs, inputs.token_ids)


def _embedded(inputs: ModelInputs, ids: torch.Tensor) -> torch.Tensor:
    return inputs.weights.embedding[ids].float()


def _embedded_of(inputs: ModelInputs, others: torch.Tensor) -> torch.Tensor:
    return inputs.of_others(_embedded(inputs, inputs.all_token_ids), others)


def _by_embedded(other_rows: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Build a `predict` that looks up the rows `other_rows(token_ids, vocab_size, **parameters)`, not `token_ids`."""
    return lambda inputs, _, **parameters: _embedded(
        inputs, other_rows(inputs.token_ids, inputs.spec.vocab_size, **parameters)
    )


def _offset_of_rank_0(inputs: ModelInputs, correct: torch.Tensor, *, tp_degree: int) -> torch.Tensor:
    """Look tokens up on ranks that all subtract 0, rank 0's first row, and keep the ids below their number of rows."""
    num_rows = inputs.spec.vocab_size // tp_degree
    summed = torch.zeros_like(correct)
    is_of_rank_0 = inputs.token_ids < num_rows
    for rank in range(tp_degree):
        summed[is_of_rank_0] += _embedded(inputs, rank * num_rows + inputs.token_ids[is_of_rank_0])
    return summed


def _columns_of_rank_0(_: ModelInputs, correct: torch.Tensor, *, tp_degree: int) -> torch.Tensor:
    return correct[:, : correct.shape[1] // tp_degree].repeat(1, tp_degree)


def _columns_not_gathered(
    _: ModelInputs, correct: torch.Tensor, *, tp_degree: int, rank: int
) -> torch.Tensor:
    hidden = correct.shape[1]
    return correct * _is_of_rank(torch.arange(hidden), hidden, tp_degree, rank)


def _usual_factors(inputs: ModelInputs) -> tuple[float, float]:
    root = math.sqrt(inputs.spec.hidden_size)
    return root, 1.0 / root


EMBEDDING_MISTAKES = (
    _of_embedding(
        name="embedding_shard_of_rank_0",
        predict=_by_embedded(_within_first_shard),
        candidates=_vocabulary_degrees,
    ),
    _of_embedding(
        name="embedding_offset_of_rank_0", predict=_offset_of_rank_0, candidates=_vocabulary_degrees
    ),
    _of_embedding(
        name="embedding_not_reduced",
        predict=lambda inputs, correct, **split: (
            correct * _is_of_rank(inputs.token_ids, inputs.spec.vocab_size, **split).unsqueeze(1)
        ),
        candidates=_vocabulary_ranks,
    ),
    _of_embedding(
        name="embedding_shards_exchanged", predict=_by_embedded(_reordered), candidates=_vocabulary_orders
    ),
    _of_embedding(name="embedding_rows_shifted", predict=_by_embedded(_shifted), candidates=_shifts),
    _of_embedding(name="embedding_columns_of_rank_0", predict=_columns_of_rank_0, candidates=_hidden_degrees),
    _of_embedding(
        name="embedding_columns_not_gathered", predict=_columns_not_gathered, candidates=_hidden_ranks
    ),
    _of_embedding(
        name="embedding_scaled",
        # Only a product is rounded again: the other predictions are values of the table, which has the dtype.
        predict=lambda inputs, correct, factor: inputs.rounded(correct * factor),
        # Beside these two, the factor that fits the port best is tried.
        candidates=each("factor", _usual_factors),
        fits_factor=True,
    ),
    _of_embedding(
        name="embedding_is_head",
        predict=lambda inputs, _: (
            inputs.weights.head[inputs.token_ids].float() if inputs.weights.has_head else None
        ),
    ),
    _of_embedding(
        name="embedding_low_precision",
        predict=lambda _, correct, dtype: ROUNDINGS[dtype](correct),
        candidates=rounding_dtypes,
    ),
    _of_embedding(
        name="embedding_of_token_before",
        predict=lambda inputs, _: _embedded_of(inputs, inputs.previous),
    ),
    _of_embedding(
        name="embedding_tokens_exchanged",
        predict=lambda inputs, _, order: _embedded_of(inputs, inputs.exchanged[order]),
        candidates=each("order", lambda inputs: inputs.exchanged),
    ),
    _of_embedding(name="embedding_zero", predict=lambda _, correct: torch.zeros_like(correct)),
)


def norm_states(inputs: ModelInputs) -> torch.Tensor:
    """Compute the correct final norm, float32 [T,H]; the last layer's output must be held."""
    return _normed_states(inputs, inputs.weights.final_norm)


def _states(inputs: ModelInputs) -> torch.Tensor:
    """Return the last layer's output, [T,H]."""
    assert inputs.states is not None, "the search asks for predictions only if the states are held"
    return inputs.states


def _normed_states(inputs: ModelInputs, weight: torch.Tensor) -> torch.Tensor:
    return normalise(_states(inputs), weight, inputs.spec.rms_norm_eps)


def _per_rank(inputs: ModelInputs, _: torch.Tensor, *, tp_degree: int) -> torch.Tensor:
    parts = _states(inputs).unflatten(-1, (tp_degree, -1))
    weights = inputs.weights.final_norm.unflatten(0, (tp_degree, -1))
    return normalise(parts, weights, inputs.spec.rms_norm_eps).flatten(-2)


def _weight_of_rank_0(inputs: ModelInputs, _: torch.Tensor, *, tp_degree: int) -> torch.Tensor:
    weight = inputs.weights.final_norm
    return _normed_states(inputs, weight[: len(weight) // tp_degree].repeat(tp_degree))


def _centred(inputs: ModelInputs, _: torch.Tensor) -> torch.Tensor:
    states = _states(inputs)
    return normalise(
        states - states.mean(-1, keepdim=True), inputs.weights.final_norm, inputs.spec.rms_norm_eps
    )


FINAL_NORM_MISTAKES = (
    _of_final_norm(
        name="final_norm_one_plus_weight",
        predict=lambda inputs, _: _normed_states(inputs, inputs.weights.final_norm + 1.0),
        candidates=once_if(lambda inputs: not inputs.spec.graph.has_gain_of_one_plus),
    ),
    _of_final_norm(
        name="final_norm_one_plus_missing",
        predict=lambda inputs, _: _normed_states(inputs, inputs.weights.final_norm - 1.0),
        candidates=once_if(lambda inputs: inputs.spec.graph.has_gain_of_one_plus),
    ),
    _of_final_norm(name="final_norm_missing", predict=lambda inputs, _: _states(inputs)),
    _of_final_norm(
        name="final_norm_unweighted",
        predict=lambda inputs, _: _normed_states(inputs, torch.ones_like(inputs.weights.final_norm)),
    ),
    _of_final_norm(
        name="final_norm_of_a_layer",
        predict=lambda inputs, _, weight: _normed_states(inputs, inputs.weights.layer_norms[weight]),
        # Names such as `2.input_layernorm`.
        candidates=each("weight", lambda inputs: inputs.weights.layer_norms),
    ),
    _of_final_norm(name="final_norm_per_rank", predict=_per_rank, candidates=_hidden_degrees),
    _of_final_norm(name="final_norm_weight_of_rank_0", predict=_weight_of_rank_0, candidates=_hidden_degrees),
    _of_final_norm(
        name="final_norm_eps",
        predict=lambda inputs, _, eps: normalise(_states(inputs), inputs.weights.final_norm, eps),
        candidates=values_of("eps", 1e-5, 1e-8, 1e-12, 1e-3, 1e-2),
    ),
    _of_final_norm(name="final_norm_centred", predict=_centred),
    _of_final_norm(
        name="final_norm_twice",
        predict=lambda inputs, correct: normalise(
            inputs.rounded(correct), inputs.weights.final_norm, inputs.spec.rms_norm_eps
        ),
    ),
    _of_final_norm(
        name="final_norm_weight_alone", predict=lambda inputs, _: _states(inputs) * inputs.weights.final_norm
    ),
    _of_final_norm(
        name="final_norm_scaled",
        predict=lambda _, correct, factor: correct * factor,
        candidates=lambda _: (),  # only the factor that fits the port best
        fits_factor=True,
    ),
)


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


def _scored_of(inputs: ModelInputs, others: torch.Tensor) -> torch.Tensor:
    assert inputs.all_normed is not None, "the search asks for predictions only if the head's input is held"
    return score_states(inputs, inputs.of_others(inputs.all_normed, others))


HEAD_MISTAKES = (
    _of_head(
        name="head_shard_of_rank_0", predict=_by_rows(_within_first_shard), candidates=_vocabulary_degrees
    ),
    _of_head(name="head_shards_exchanged", predict=_by_rows(_reordered), candidates=_vocabulary_orders),
    _of_head(
        name="head_not_gathered",
        predict=lambda inputs, correct, **split: (
            correct * _is_of_rank(inputs.columns, inputs.spec.vocab_size, **split)
        ),
        candidates=_vocabulary_ranks,
    ),
    _of_head(name="head_is_embedding", predict=_of_the_embedding),
    _of_head(name="head_rows_shifted", predict=_by_rows(_shifted), candidates=_shifts),
    _of_head(
        name="head_rows_exchanged",
        predict=_by_rows(_exchanged),
        candidates=values_of("rows", "neighbours", "all reversed"),
    ),
    _of_head(name="head_transposed", predict=_transposed),
    _of_head(
        name="head_without_norm",
        predict=lambda inputs, _: None if inputs.states is None else score_states(inputs, inputs.states),
    ),
    _of_head(name="head_normed_twice", predict=_normed_twice),
    _of_head(name="head_of_token_before", predict=lambda inputs, _: _scored_of(inputs, inputs.previous)),
    _of_head(
        name="head_tokens_exchanged",
        predict=lambda inputs, _, order: _scored_of(inputs, inputs.exchanged[order]),
        candidates=each("order", lambda inputs: inputs.exchanged),
    ),
    _of_head(
        name="head_scaled",
        predict=lambda _, correct, factor: correct * factor,
        candidates=lambda _: (),  # only the factor that fits the port best
        fits_factor=True,
    ),
    _of_head(name="head_low_precision", predict=_low_precision, candidates=rounding_dtypes),
    _of_head(name="head_zero", predict=lambda _, correct: torch.zeros_like(correct)),
)

_BUILT = {entry.name: entry for entry in (*EMBEDDING_MISTAKES, *FINAL_NORM_MISTAKES, *HEAD_MISTAKES)}
# If two explain a site alike, the earlier is named first.
MODEL_CATALOGUE: Mapping[str, ModelMistake] = MappingProxyType(
    {name: _BUILT[name] for name in read_words(Place.OUTSIDE)}
)
