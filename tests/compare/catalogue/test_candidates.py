"""The catalogue: what is tried on a model of usual size, and the words of each mistake."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from compare.catalogue.cache import CACHE_MISTAKES
from compare.catalogue.cached_attention import DecodedInputs
from compare.catalogue.candidates import Parameters, degrees, share
from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.clues import Clues, WrongTokens
from compare.catalogue.decoding import DECODING_MISTAKES
from compare.catalogue.misread import has_fp8_weights
from compare.catalogue.mistake import Mistake
from compare.catalogue.outside import MODEL_CATALOGUE, ModelInputs
from compare.catalogue.words import Place, read_words, require_fitting, require_known
from minimax_tools.errors import UsageError
from minimax_tools.model import weight_names
from minimax_tools.model.graph import ModelGraph, QkNorm, RouterScores
from minimax_tools.reference.evaluation import Evaluation, LayerInputs

# All parameters that are tried on small models; --update writes it anew.
GOLDEN = Path(__file__).with_name("candidates.json")
PAGE = Path(__file__).parents[3] / "docs" / "diagnosis.md"


def find(name: str) -> Mistake:
    return CATALOGUE[name]


def clues(wrong: WrongTokens) -> Clues:
    base = SimpleNamespace(graph=ModelGraph().layer(0))
    return cast("Clues", SimpleNamespace(wrong_tokens=wrong, base=base))


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


def layer_inputs(layer: Evaluation) -> dict[str, LayerInputs]:
    """Other inputs of the layer, on which other parameters can show."""

    def of_spec(**parts: Any) -> LayerInputs:
        return replace(layer.inputs, spec=replace(layer.spec, **parts))

    def of_length(length: int) -> LayerInputs:
        mask = torch.ones(1, length, dtype=torch.int64)
        return replace(layer.inputs, attention_mask=mask, position_ids=torch.arange(length)[None])

    weights: Any = layer.weights
    others = (weight_names.K_PROJ, weight_names.expert_weight(0, "w3"))
    return {
        # The last of 513 positions is 512. A window must hide a key, and a precision must show.
        **{f"{length} tokens": of_length(length) for length in (257, 258, 513, 2050, 8192, 8193, 131073)},
        "10 experts": of_spec(num_local_experts=10),
        "16 experts": of_spec(num_local_experts=16),
        "8 of 64 experts": of_spec(num_local_experts=64, num_experts_per_tok=8),
        "one expert": of_spec(num_local_experts=1, num_experts_per_tok=1),
        "one key head": of_spec(num_key_value_heads=1),
        "a key head for each query head": of_spec(num_key_value_heads=4),
        "6 rotary dims": of_spec(rotary_dim=6),
        "k_proj and w3 not in FP8": replace(layer.inputs, weights=weights.without_fp8(*others)),
    }


def decoded_inputs_of(decoded: DecodedInputs) -> dict[str, LayerInputs]:
    """Other inputs of a layer that decodes."""
    mask = torch.ones(1, 20, dtype=torch.int64)
    alone = replace(
        decoded,
        attention_mask=mask,
        position_ids=mask.cumsum(1) - 1,
        numbers=(mask.cumsum(1) - 17).clamp(min=0),
        caches={2: None, 5: None},  # type: ignore[dict-item]
    )
    padded = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    numbers = torch.tensor([[0] * 6 + [1, 2, 3], [0] * 3 + [1, 2, 3] + [0] * 3])
    positions = (padded.cumsum(1) - 1).clamp(min=0)
    return {
        "nothing is decoded": LayerInputs(
            **{one.name: getattr(decoded, one.name) for one in fields(LayerInputs)},
        ),
        # Multiples of each size hold a longer prefill; there is no other prompt, and no padding.
        "a prompt alone": alone,
        "padding": replace(
            decoded,
            attention_mask=padded,
            position_ids=positions,
            numbers=numbers,
            padding={"token 7": torch.zeros(1)},
        ),
        **{
            f"{number} key heads": replace(decoded, spec=replace(decoded.spec, num_key_value_heads=number))
            for number in (1, 2)
        },
    }


def listed_all(mistakes: Iterable[Mistake], inputs: LayerInputs) -> dict[str, str]:
    return {mistake.name: listed(mistake.candidates(inputs)) for mistake in mistakes}


def test_what_is_tried_is_what_the_golden_file_lists(
    layer: Evaluation, open_layer: Callable[..., Evaluation], request: pytest.FixtureRequest
) -> None:
    outside = SimpleNamespace(
        spec=replace(layer.spec, vocab_size=48),
        exchanged={"rows rolled": None},
        weights=SimpleNamespace(layer_norms={"0.input_layernorm": None}),
    )
    decoded = cast("DecodedInputs", open_layer(torch.ones(2, 9, dtype=torch.int64), num_decoded=3).inputs)
    found = {
        f"outside {name}": listed(one.candidates(cast("ModelInputs", outside)))
        for name, one in MODEL_CATALOGUE.items()
    }
    for place, mistakes, usual, others in (
        ("layer", CATALOGUE.values(), layer.inputs, layer_inputs(layer)),
        ("decoding", DECODING_MISTAKES, decoded, decoded_inputs_of(decoded)),
    ):
        first = listed_all(mistakes, usual)
        found |= {f"{place} {name}": words for name, words in first.items()}
        for title, inputs in others.items():
            again = listed_all(mistakes, inputs)
            found |= {
                f"{place}, {title}: {name}": again[name] for name in again if again[name] != first[name]
            }
    if request.config.getoption("--update"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(GOLDEN.read_text())
    assert has_fp8_weights(layer_inputs(layer)["k_proj and w3 not in FP8"])


def test_sizes_are_spread_over_powers_of_two_and_three_times_those() -> None:
    assert degrees(768) == (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
    assert degrees(8) == (2, 4, 8)
    # The share of a rank is its block.
    assert share(12, 4, 2) == slice(6, 9)


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


@pytest.mark.parametrize(
    ("place", "names"),
    [
        (Place.LAYER, list(CATALOGUE)),
        (Place.OUTSIDE, list(MODEL_CATALOGUE)),
        (Place.DECODING, [mistake.name for mistake in DECODING_MISTAKES]),
        # The last is seen by what a pass changed.
        (Place.CACHE, [*CACHE_MISTAKES, "cache_overwritten"]),
    ],
)
def test_each_mistake_has_words_and_each_words_a_mistake(place: Place, names: list[str]) -> None:
    assert list(read_words(place)) == names
    for words in read_words(place).values():
        assert words.what.endswith(".")
        assert words.look_at


def test_page_counts_the_mistakes() -> None:
    layer, outside = (len(read_words(place)) for place in (Place.LAYER, Place.OUTSIDE))
    told = f"{layer + outside} mistakes that real ports had: {layer} in a layer, {outside} outside the layers"
    assert told in PAGE.read_text(encoding="utf-8")


def test_unknown_name_is_refused_with_a_near_one() -> None:
    require_known(("norm_eps", "head_zero"))
    with pytest.raises(UsageError, match="gate_up_swaped.*gate_up_swapped"):
        require_known(("gate_up_swaped",))
    with pytest.raises(UsageError) as unlike:
        require_known(("too_many_cooks",))
    assert "Did you mean" not in str(unlike.value)
    with pytest.raises(UsageError):
        require_known(("head_zero",), places=(Place.LAYER,))


# Options of the graph, and the mistakes that are none with others.
SOFTMAX = ModelGraph(
    qk_norm=QkNorm.PER_HEAD,
    router_scores=RouterScores.SOFTMAX,
    has_float32_router=False,
    has_correction_bias=False,
    normalises_shares=False,
)
OF_ONE_GRAPH = {
    "qk_norm_per_rank": "norms over all heads",
    "qk_norm_weight_averaged": "norms over all heads",
    "qk_norm_by_head_averaged": "norms over all heads",
    "qk_norm_first_slice": "norms over all heads",
    "router_softmax": "sigmoid",
    "router_bias_missing": "correction bias",
    "router_bias_low_precision": "correction bias",
    "router_choice_low_precision": "correction bias",
    "router_bias_negated": "correction bias",
    "router_bias_in_weights": "correction bias",
    "router_weights_not_normalised": "weights of sum 1",
    "router_low_precision": "float32 router",
    "router_gate_low_precision": "float32 router",
    "router_softmax_of_chosen": "sigmoid",
    "router_sigmoid_missing": "sigmoid, correction bias",
}
OF_THE_OTHER = {
    "qk_norm_over_all_heads": "norms per head",
    "router_sigmoid": "softmax",
    "router_weights_normalised": "weights of any sum",
}


def test_mistakes_are_those_of_a_graph(layer: Evaluation) -> None:
    for name, models in (OF_ONE_GRAPH | OF_THE_OTHER).items():
        assert find(name).words.models == models
    other = replace(layer.inputs, spec=replace(layer.spec, graph=SOFTMAX))
    for inputs, others in ((layer.inputs, OF_THE_OTHER), (other, OF_ONE_GRAPH)):
        for name in OF_ONE_GRAPH | OF_THE_OTHER:
            assert bool(find(name).hypotheses(inputs)) is (name not in others), name


def test_mistake_of_another_graph_is_refused() -> None:
    require_fitting(("router_softmax", "norm_eps", "head_zero"), ModelGraph())
    with pytest.raises(UsageError, match="router_softmax is no mistake in this model.*a model with sigmoid"):
        require_fitting(("norm_eps", "router_softmax"), SOFTMAX)
