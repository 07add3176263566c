"""Sizes, ranks and positions that are tried on a model of usual size."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from compare.catalogue.candidates import Parameters, Value, degrees, rank_of, share
from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.clues import Clues, WrongTokens
from compare.catalogue.decoding import DECODING_MISTAKES
from compare.catalogue.mistake import Mistake
from compare.catalogue.outside import MODEL_CATALOGUE, ModelInputs
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Evaluation, LayerInputs

# All parameters that are tried on small models; --update writes it anew.
GOLDEN = Path(__file__).with_name("candidates.json")


def find(name: str) -> Mistake:
    return CATALOGUE[name]


def clues(wrong: WrongTokens) -> Clues:
    return cast("Clues", SimpleNamespace(wrong_tokens=wrong))


def listed(candidates: tuple[Parameters, ...]) -> str:
    """Candidates in words: `factor 2; factor 0.5`, or `once` for a mistake without parameters."""
    words = [
        ", ".join(
            f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in one.items()
        )
        for one in candidates
    ]
    return "once" if words == [""] else "; ".join(words) or "nothing"


def test_what_is_tried_is_what_the_golden_file_lists(
    layer: Evaluation, open_layer: Callable[..., Evaluation], request: pytest.FixtureRequest
) -> None:
    outside = SimpleNamespace(
        spec=replace(layer.spec, vocab_size=48),
        exchanged={"rows rolled": None},
        weights=SimpleNamespace(layer_norms={"0.input_layernorm": None}),
    )
    decoded = open_layer(torch.ones(2, 9, dtype=torch.int64), num_decoded=3).inputs
    found = {
        **{f"layer {name}": listed(one.candidates(layer.inputs)) for name, one in CATALOGUE.items()},
        **{
            f"outside {name}": listed(one.candidates(cast("ModelInputs", outside)))
            for name, one in MODEL_CATALOGUE.items()
        },
        **{f"decoding {one.name}": listed(one.candidates(decoded)) for one in DECODING_MISTAKES},
    }
    if request.config.getoption("--update"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(GOLDEN.read_text())


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
