"""Attention of decoded tokens over a cache: over a right one, it is the layer's attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from compare.catalogue.cached_attention import (
    HIDDEN,
    attend_view,
    decoded_inputs,
    right_view,
)
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Evaluation

MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])


@pytest.fixture(scope="module")
def layer(open_layer: Callable[..., Evaluation]) -> Evaluation:
    return open_layer(MASK, num_decoded=2)


def test_steps_count_the_decoded_tokens_of_each_prompt(layer: Evaluation) -> None:
    inputs = decoded_inputs(layer)
    assert inputs.numbers.tolist() == [[0, 0, 0, 0, 0, 1, 2], [0, 0, 0, 1, 2, 0, 0]]
    assert inputs.columns()[inputs.is_decoded].tolist() == [5, 6, 5, 6]
    assert (inputs.prefilled().tolist(), inputs.num_decoded, inputs.prefill_width) == ([5, 3], 2, 5)


def test_a_right_cache_gives_the_layers_attention(layer: Evaluation) -> None:
    torch.testing.assert_close(attend_view(layer, right_view(layer)), layer[Site.ATTN_CONTEXT])


def test_an_entry_counts_as_often_as_it_is_seen(layer: Evaluation) -> None:
    right = right_view(layer)
    key, value = right.keys[:, :, 0], right.values[:, :, 0]
    once = torch.ones(len(layer.tokens))
    twice = attend_view(layer, right.with_entry(key, value, 2 * once))
    both = attend_view(layer, right.with_entry(key, value, once).with_entry(key, value, once))
    torch.testing.assert_close(twice, both)
    never = attend_view(layer, right.with_entry(key, value, 0 * once))
    torch.testing.assert_close(never, attend_view(layer, right))


def test_a_token_that_sees_nothing_gets_zeros(layer: Evaluation) -> None:
    right = right_view(layer)
    blind = replace(
        right, shown=torch.full_like(right.shown, HIDDEN), shows_own=torch.zeros_like(right.shows_own)
    )
    assert not attend_view(layer, blind).any()
