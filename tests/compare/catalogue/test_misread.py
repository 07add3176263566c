"""Weights that a port takes from another layer, or reads wrongly from FP8 codes and scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.low_bits import ROUNDINGS, fp8_blocks, fp8_groups, integer_groups, offset_groups
from compare.catalogue.misread import has_fp8_weights
from compare.catalogue.mistake import Mistake
from minimax_tools.checkpoint.fp8 import decode_codes
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import EXPERT_MATRICES
from minimax_tools.reference.evaluation import Evaluation
from minimax_tools.reference.expert_pass import Allocate, Decoding, LayerWeights


def find(name: str) -> Mistake:
    return CATALOGUE[name]


def of_layer_5(layer: Evaluation, name: str) -> torch.Tensor:
    return layer.weights.of_layer(5).kept_value(name)


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        (
            Site.INPUT_NORM,
            lambda layer: (
                layer[Site.INPUT]
                / (layer[Site.INPUT].square().mean(-1, keepdim=True) + 1e-2).sqrt()
                * of_layer_5(layer, weight_names.INPUT_NORM)
            ),
        ),
        (Site.K_PROJ, lambda layer: layer[Site.INPUT_NORM] @ of_layer_5(layer, weight_names.K_PROJ).T),
        (Site.ATTN_DELTA, lambda layer: layer[Site.ATTN_CONTEXT] @ of_layer_5(layer, weight_names.O_PROJ).T),
        (
            Site.ROUTER_EXPERTS,
            lambda layer: (
                (layer[Site.ROUTER_LOGITS].sigmoid() + of_layer_5(layer, weight_names.CORRECTION_BIAS))
                .topk(3)
                .indices
            ),
        ),
    ],
)
def test_layer_computes_with_the_weights_of_another(
    layer: Evaluation, site: Site, expected: Callable[[Evaluation], torch.Tensor]
) -> None:
    change = find("weights_of_another_layer").build(source_layer=5)
    torch.testing.assert_close(change.stages[site](layer), expected(layer))
    assert change.recipe is not None
    assert change.recipe.changed == EXPERT_MATRICES


def test_likely_layers_are_neighbours_the_first_and_those_of_text_order(layer: Evaluation) -> None:
    # As text, layer 2 stands at place 4, and layer 10, which the checkpoint lacks, at place 2.
    tried = [one["source_layer"] for one in find("weights_of_another_layer").candidates(layer.inputs)]
    assert tried == [1, 3, 4, 0]


CODES = (100 * torch.randn(256, 384, generator=torch.Generator().manual_seed(0))).to(torch.float8_e4m3fn)
SCALES = torch.tensor([[1.0, 0.3, 5.0], [2.0, 0.7, 0.1]])
BLOCKS = SCALES.repeat_interleave(128, 0).repeat_interleave(128, 1)


class Fp8Weights:
    """Weights that are stored in FP8, but for some."""

    def __init__(self, *others: str) -> None:
        self._others = others

    def is_fp8(self, name: str) -> bool:
        return name not in self._others

    def value(self, _: str, decoding: Decoding, *, allocate: Allocate = torch.empty) -> torch.Tensor:
        return decode_codes(
            CODES,
            decoding.scales(SCALES),
            numbers=decoding.numbers,
            dtype=torch.float32,
            out=allocate(CODES.shape),
        )


class Projection(dict[Site, torch.Tensor]):
    weights = Fp8Weights()


def test_codes_are_read_as_integers() -> None:
    projection = cast("Evaluation", Projection({Site.INPUT_NORM: torch.eye(384)}))
    change = find("fp8_codes_as_integers").build(tensor="q_proj")
    found = change.stages[Site.Q_PROJ](projection)
    torch.testing.assert_close(found, (CODES.view(torch.uint8).float() * BLOCKS).T)
    assert change.recipe is None


def test_only_what_is_stored_in_fp8_is_tried(layer: Evaluation) -> None:
    def inputs(*others: str) -> Any:
        return replace(layer.inputs, weights=cast("LayerWeights", Fp8Weights(*others)))

    some = inputs(weight_names.K_PROJ, weight_names.expert_weight(0, "w3"))
    tried = [one["tensor"] for one in find("fp8_scale_missing").candidates(some)]
    assert sorted(map(str, tried)) == ["o_proj", "q_proj", "v_proj", "w1", "w2"]
    for name, parameters in (("fp8_clipped", {"limit": 240}), ("fp8_scale_power_of_two", {})):
        assert find(name).candidates(inputs()) == (parameters,)
        assert find(name).candidates(some) == ()
    assert has_fp8_weights(some)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", [127.0, 3.296875, -600.0]),
        ("float16", [127.0, 3.30078125, -600.0]),
        ("float8_e4m3fn", [128.0, 3.25, -448.0]),
        ("float8_e4m3fn with a scale for each row", [128.571428, 3.3482142, -600.0]),
        ("int8 with a scale for each row", [127.559055, 4.7244094, -600.0]),
    ],
)
def test_rows_are_rounded_to_each_dtype(dtype: str, expected: list[float]) -> None:
    rows = torch.tensor([[127.0, 3.3, -600.0]])
    assert ROUNDINGS[dtype](rows)[0].tolist() == pytest.approx(expected)


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
