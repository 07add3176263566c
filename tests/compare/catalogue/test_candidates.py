"""Sizes, ranks and positions that are tried on a model of usual size."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from compare.catalogue.candidates import Value, degrees, rank_of, share
from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.clues import Clues, WrongTokens
from compare.catalogue.low_bits import fp8_blocks, fp8_groups, integer_groups, offset_groups
from compare.catalogue.mistake import Mistake
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Evaluation, LayerInputs


def find(name: str) -> Mistake:
    return CATALOGUE[name]


def clues(wrong: WrongTokens) -> Clues:
    return cast("Clues", SimpleNamespace(wrong_tokens=wrong))


def test_sizes_are_spread_over_powers_of_two_and_three_times_those() -> None:
    assert degrees(768) == (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
    assert degrees(8) == (2, 4, 8)


def test_each_of_eight_ranks_is_tried_and_the_first_of_more(layer: Evaluation) -> None:
    inputs = replace(layer.inputs, spec=replace(layer.spec, num_local_experts=16))
    tried = [tuple(one.values()) for one in rank_of("ep_degree", "num_local_experts")(inputs)]
    assert tried == [(degree, rank) for degree in (2, 4, 8) for rank in range(degree)] + [(16, 0)]


def test_share_of_a_rank_is_its_block() -> None:
    assert share(12, 4, 2) == slice(6, 9)


def long_prompt(layer: Evaluation, length: int) -> LayerInputs:
    return replace(
        layer.inputs,
        attention_mask=torch.ones(1, length, dtype=torch.int64),
        position_ids=torch.arange(length)[None],
    )


def tried(name: str, inputs: LayerInputs) -> list[Value]:
    return [value for parameters in find(name).candidates(inputs) for value in parameters.values()]


def test_windows_that_hide_a_key_are_tried(layer: Evaluation) -> None:
    usual = [8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert tried("sliding_window", long_prompt(layer, 8193)) == usual
    assert tried("sliding_window", long_prompt(layer, 8192)) == usual[:-1]


def test_sizes_of_tables_that_change_a_position_are_tried(layer: Evaluation) -> None:
    # The last of 513 positions is 512.
    inputs = long_prompt(layer, 513)
    assert tried("rope_positions_modulo", inputs) == [64, 128, 256, 512]
    assert tried("rope_positions_clamped", inputs) == [63, 127, 255, 511]
    assert tried("rope_positions_modulo", long_prompt(layer, 131073))[-1] == 131072
    assert tried("rope_positions_counted", inputs) == []
    edges = find("rope_positions_at_chunk_edges")
    sizes = [8, 16, 32, 64, 128, 256, 512]
    assert [tuple(one.values()) for one in edges.candidates(inputs)] == [
        (size, of) for size in sizes for of in ("keys", "queries and keys")
    ]
    assert edges.build(size=8, of="keys").sites == {Site.K_ROPE}


@pytest.mark.parametrize(
    ("length", "dtypes"), [(257, []), (258, ["bfloat16"]), (2050, ["bfloat16", "float16"])]
)
def test_low_precision_of_positions_is_tried_where_it_shows(
    layer: Evaluation, length: int, dtypes: list[str]
) -> None:
    assert tried("rope_positions_low_precision", long_prompt(layer, length)) == dtypes


def test_positions_past_the_largest_number_are_clamped(layer: Evaluation) -> None:
    far = Evaluation(
        replace(layer.inputs, position_ids=torch.full((2, 6), 70_000)),
        layer._stages,
        tokens=layer.tokens,
        values=dict(layer._values),
    )
    found = find("rope_positions_low_precision").build(dtype="float16")
    stage = next(iter(found.stages.values()))
    assert bool(stage(far).isfinite().all())


def test_first_wrong_position_is_tried_as_the_end_of_a_table() -> None:
    # Of tokens at positions 0 to 7, those from 6 on are wrong.
    wrong = WrongTokens(
        is_wrong=torch.arange(8) >= 6,
        experts=torch.zeros(8, 1, dtype=torch.int64),
        positions=torch.arange(8),
        num_experts=2,
    )
    for name, value in (("rope_positions_modulo", {"modulo": 6}), ("rope_positions_clamped", {"last": 5})):
        first, *_ = find(name).found_hypotheses(clues(wrong))
        assert first.parameters == (value,)


def test_experts_whose_tokens_are_wrong_are_tried_as_exchanged() -> None:
    experts = torch.tensor([[0], [1], [2], [3]]).repeat(6, 1)
    wrong = WrongTokens(
        is_wrong=(experts[:, 0] == 1) | (experts[:, 0] == 3),
        experts=experts,
        positions=torch.arange(24),
        num_experts=4,
    )
    (hypothesis,) = find("experts_exchanged").found_hypotheses(clues(wrong))
    assert hypothesis.parameters == ({"first": 1, "second": 3},)


@pytest.mark.parametrize(("degree", "is_each_head"), [(4, True), (2, False)])
def test_norm_of_each_head_is_told(layer: Evaluation, degree: int, is_each_head: bool) -> None:
    told = find("qk_norm_per_rank").describe(layer.spec, {"tp_degree": degree})
    assert ("each head is normed alone." in told) is is_each_head


class TestLowBits:
    """Scales map the largest number of a block to the largest of the format."""

    def test_blocks_have_a_scale_each(self) -> None:
        weight = torch.tensor([[448.0, 101.0, 1.0], [3.3, 0.0, 0.0]])
        # 3.3 is rounded in steps of 0.25 where the largest is 448; 1.0 is the largest of its own block.
        assert fp8_blocks(weight, block=2).tolist() == [[448.0, 104.0, 1.0], [3.25, 0.0, 0.0]]

    def test_groups_of_a_row_have_a_scale_each(self) -> None:
        states = torch.tensor([[448.0, 3.3, 4.48, 0.033]])
        assert fp8_groups(states, width=2)[0].tolist() == pytest.approx([448.0, 3.25, 4.48, 0.0325])

    def test_groups_with_an_offset_have_even_steps_from_the_least(self) -> None:
        weight = torch.tensor([[1.0, 1.3, 2.0, -4.0, -1.0, 0.0]])
        found = offset_groups(weight, 3, num_steps=4)[0].tolist()
        assert found == pytest.approx([1.0, 1.25, 2.0, -4.0, -1.0, 0.0])

    def test_integers_have_steps_of_the_largest(self) -> None:
        weight = torch.tensor([[7.0, 2.4, -7.0, 0.24, 0.7, 0.0]])
        found = integer_groups(weight, 3, largest=7.0)[0].tolist()
        assert found == pytest.approx([7.0, 2.0, -7.0, 0.2, 0.7, 0.0])
