"""Mistakes outside the layers predict what a port gives that makes them, on a small vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import cast

import pytest
import torch
from torch.nn import functional

from compare.catalogue.candidates import Parameters
from compare.catalogue.outside import (
    MODEL_CATALOGUE,
    ModelInputs,
    ModelMistake,
    ModelWeights,
    embed,
    norm_states,
    score,
)
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec

VOCABULARY, HIDDEN, EPS = 12, 4, 1e-2
GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.tensor([0, 1, 2, 5, 6, 7, 11])
COLUMNS = torch.tensor([0, 1, 2, 4, 7, 11])
# Seven judged tokens of eight; the first and the fifth begin a prompt.
PREVIOUS = torch.tensor([-1, 0, 1, 2, -1, 4, 6])


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights outside the layers, as `ModelWeights` gives them."""

    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    layer_norms: Mapping[str, torch.Tensor]
    has_head: bool = True


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


WEIGHTS = Weights(
    embedding=draw(VOCABULARY, HIDDEN),
    head=draw(VOCABULARY, HIDDEN),
    final_norm=draw(HIDDEN),
    layer_norms={"0.input_layernorm": draw(HIDDEN), "0.post_attention_layernorm": draw(HIDDEN)},
)
ALL_NORMED = draw(8, HIDDEN)
INPUTS = ModelInputs(
    spec=ModelSpec(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
        rotary_dim=2,
        rope_theta=100.0,
        rms_norm_eps=EPS,
        num_local_experts=2,
        num_experts_per_tok=1,
        intermediate_size=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        raw=MappingProxyType({}),
    ),
    weights=cast("ModelWeights", WEIGHTS),
    columns=COLUMNS,
    dtype=torch.bfloat16,
    token_ids=TOKENS,
    all_token_ids=torch.tensor([0, 1, 2, 5, 6, 7, 9, 11]),
    previous=PREVIOUS,
    states=draw(len(TOKENS), HIDDEN),
    normed=ALL_NORMED[[0, 1, 2, 3, 4, 5, 7]],
    all_normed=ALL_NORMED,
)
assert INPUTS.states is not None
assert INPUTS.normed is not None
STATES, NORMED = INPUTS.states, INPUTS.normed
CORRECT = {
    ModelSite.EMBEDDING: embed(INPUTS),
    ModelSite.FINAL_NORM: norm_states(INPUTS),
    ModelSite.LOGITS: score(INPUTS),
}


def find(name: str) -> ModelMistake:
    return MODEL_CATALOGUE[name]


def normed(states: torch.Tensor, weight: torch.Tensor = WEIGHTS.final_norm, eps: float = EPS) -> torch.Tensor:
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def low(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def of_rows(rows: list[int]) -> torch.Tensor:
    """Logits from these rows of the head."""
    return NORMED @ WEIGHTS.head[rows].T


def kept(is_kept: list[int]) -> torch.Tensor:
    return torch.tensor(is_kept, dtype=torch.float32)


def test_right_values_are_those_of_the_model() -> None:
    assert torch.equal(CORRECT[ModelSite.EMBEDDING], WEIGHTS.embedding[TOKENS])
    torch.testing.assert_close(CORRECT[ModelSite.FINAL_NORM], normed(STATES))
    torch.testing.assert_close(CORRECT[ModelSite.LOGITS], of_rows(COLUMNS.tolist()))


def summed_by_rank_0() -> torch.Tensor:
    rows = torch.zeros(len(TOKENS), HIDDEN)
    for place, token in enumerate(TOKENS.tolist()):
        if token < 6:
            rows[place] = WEIGHTS.embedding[token] + WEIGHTS.embedding[token + 6]
    return rows


# Of those that no run of `compare/diagnosis/test_model.py` makes. Shards of twelve rows on two ranks, six each, or on
# three, four each.
CASES: list[tuple[str, Parameters, Callable[[], torch.Tensor]]] = [
    ("embedding_offset_of_rank_0", {"tp_degree": 2}, summed_by_rank_0),
    (
        "embedding_not_reduced",
        {"tp_degree": 3, "rank": 1},
        lambda: WEIGHTS.embedding[TOKENS] * kept([0, 0, 0, 1, 1, 1, 0])[:, None],
    ),
    (
        "embedding_shards_exchanged",
        {"tp_degree": 3, "order": "strided"},
        lambda: WEIGHTS.embedding[[0, 3, 6, 4, 7, 10, 11]],
    ),
    (
        "embedding_shards_exchanged",
        {"tp_degree": 3, "order": "gathered strided"},
        lambda: WEIGHTS.embedding[[0, 4, 8, 9, 2, 6, 11]],
    ),
    ("embedding_rows_shifted", {"by": 2}, lambda: WEIGHTS.embedding[[2, 3, 4, 7, 8, 9, 1]]),
    (
        "embedding_columns_of_rank_0",
        {"tp_degree": 2},
        lambda: WEIGHTS.embedding[TOKENS][:, [0, 1, 0, 1]],
    ),
    (
        "embedding_columns_not_gathered",
        {"tp_degree": 2, "rank": 1},
        lambda: WEIGHTS.embedding[TOKENS] * kept([0, 0, 1, 1]),
    ),
    (
        "final_norm_weight_of_rank_0",
        {"tp_degree": 2},
        lambda: normed(STATES, WEIGHTS.final_norm[[0, 1, 0, 1]]),
    ),
    ("final_norm_eps", {"eps": 0.5}, lambda: normed(STATES, eps=0.5)),
    (
        "final_norm_centred",
        {},
        lambda: functional.layer_norm(STATES, (HIDDEN,), weight=WEIGHTS.final_norm, eps=EPS),
    ),
    ("final_norm_scaled", {"factor": 3.0}, lambda: 3 * normed(STATES)),
    (
        "head_not_gathered",
        {"tp_degree": 3, "rank": 1},
        lambda: of_rows(COLUMNS.tolist()) * kept([0, 0, 0, 1, 1, 0]),
    ),
    ("head_rows_exchanged", {"rows": "all reversed"}, lambda: of_rows([11, 10, 9, 7, 4, 0])),
    ("head_normed_twice", {}, lambda: low(normed(NORMED)) @ WEIGHTS.head[COLUMNS].T),
]


@pytest.mark.parametrize(("name", "parameters", "expected"), CASES)
def test_prediction_is_what_the_port_gives(
    name: str, parameters: Parameters, expected: Callable[[], torch.Tensor]
) -> None:
    mistake = find(name)
    correct = CORRECT[mistake.site]
    found = mistake.predict(INPUTS, correct, **parameters)
    assert found is not None
    torch.testing.assert_close(found, expected(), equal_nan=True)
    assert not torch.equal(found, correct)


def test_last_row_without_a_neighbour_stays() -> None:
    inputs = replace(INPUTS, spec=replace(INPUTS.spec, vocab_size=11), columns=torch.tensor([8, 10]))
    found = find("head_rows_exchanged").predict(inputs, None, rows="neighbours")
    assert found is not None
    torch.testing.assert_close(found, of_rows([9, 10]))


def test_nothing_is_predicted_from_what_is_not_held() -> None:
    tied = replace(INPUTS, weights=cast("ModelWeights", replace(WEIGHTS, has_head=False)))
    assert find("head_is_embedding").predict(tied, None) is None
    assert find("head_without_norm").predict(replace(INPUTS, states=None), None) is None
