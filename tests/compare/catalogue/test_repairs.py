"""A repair undoes its mistake: the layer with both is the right layer. Mistakes to undo, as a command takes them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.catalogue.candidates import Parameters
from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.repairs import lines_for_layers, repair_lines
from compare.catalogue.undo import Undo, join_hypotheses, undo_finding
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.errors import UsageError
from minimax_tools.model.families.glm4_moe import GLM4_MOE
from minimax_tools.model.families.minimax_m2 import MINIMAX_M2
from minimax_tools.model.families.minimax_m3 import MINIMAX_M3
from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph, QkNorm
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.evaluation import STAGES, Evaluation, LayerInputs
from minimax_tools.reference.expert_pass import LayerWeights
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.ports.target import target_config

PARAMETERS: dict[str, Parameters] = {
    "expert_ids_shifted": {"offset": 1},
    "experts_exchanged": {"first": 5, "second": 6},
    # Experts 3, 4 and 5 take turns.
    "experts_rearranged": {"order": " ".join(map(str, (0, 1, 2, 4, 5, 3, *range(6, 32))))},
    "moe_delta_scaled": {"factor": 2.0},
    "attention_delta_scaled": {"factor": 8.0},
    "projection_scaled": {"tensor": "v_proj", "factor": 64.0},
    "q_norm_scaled": {"factor": 0.5},
    "k_norm_scaled": {"factor": 0.35},
    "q_heads_interleaved": {"order": "by group"},
    "mlp_gate_up_swapped": {"mlp": "shared experts"},
}
# MiniMax-M3 norms each head, by 1 + weight, and has shared experts; GLM-4 MoE has biases.
FAMILIES = (MINIMAX_M2, MINIMAX_M3, GLM4_MOE)


def is_repaired(name: str, graph: ModelGraph) -> bool:
    # Norms of all heads of queries and of keys have other widths, and nobody can exchange them.
    if name == "qk_norm_weights_exchanged" and graph.qk_norm is QkNorm.ALL_HEADS:
        return False
    mistake = CATALOGUE[name]
    return mistake.has_repair(graph) and mistake.fits(graph)


REPAIRED = [
    (family, name)
    for family in FAMILIES
    for name in CATALOGUE
    if is_repaired(name, SyntheticModel.toy(family).spec().graph)
]
IDS = [f"{family.toy_preset}-{name}" for family, name in REPAIRED]
LENGTH = 24


def evaluate(tensors: LayerTensors) -> Evaluation:
    """The layer with these weights, on random states."""
    spec = ModelSpec.from_folder(tensors.reader.folder)
    states = torch.randn(1, LENGTH, spec.hidden_size, generator=torch.Generator().manual_seed(0))
    inputs = LayerInputs(
        graph=spec.graph.layer(tensors.layer),
        spec=spec,
        weights=LayerWeights(tensors),
        attention_mask=torch.ones(1, LENGTH, dtype=torch.int64),
        position_ids=torch.arange(LENGTH)[None],
        decode_start=LENGTH,
    )
    return Evaluation(inputs, STAGES, tokens=inputs.judged_tokens, values={Site.INPUT: states})


def config_of(tensors: LayerTensors) -> SimpleNamespace:
    return target_config(ModelSpec.from_folder(tensors.reader.folder))


def outputs(
    name: str, parameters: Parameters, tensors: LayerTensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The right output, that of the mistake, and that of the mistake on repaired weights."""
    mistake = CATALOGUE[name]
    change = mistake.with_parameters(parameters).change
    repaired = tensors.copy()
    assert mistake.repair is not None
    mistake.repair(repaired, config_of(tensors), **parameters)
    with torch.no_grad():
        right = evaluate(tensors)
        return (
            right[Site.OUTPUT],
            right.changed(change)[Site.OUTPUT],
            evaluate(repaired).changed(change)[Site.OUTPUT],
        )


@pytest.mark.parametrize(("family", "name"), REPAIRED, ids=IDS)
def test_mistake_on_repaired_weights_is_right(
    family: Family, name: str, float32_layer: Callable[..., LayerTensors]
) -> None:
    tensors = float32_layer(family.model_type)
    right, mistaken, repaired = outputs(name, PARAMETERS.get(name, {}), tensors)
    error = (mistaken - right).norm()
    assert error > 1e-3 * right.norm()
    assert (repaired - right).norm() < 1e-2 * error


@pytest.mark.parametrize("order", ["by group", "by place"])
def test_query_heads_are_put_back_from_either_order(order: str, tensors: LayerTensors) -> None:
    right, mistaken, repaired = outputs("q_heads_interleaved", {"order": order}, tensors)
    assert (repaired - right).norm() < 1e-2 * (mistaken - right).norm()


def test_repair_with_another_parameter_does_not_undo_the_mistake(tensors: LayerTensors) -> None:
    repaired = tensors.copy()
    repair = CATALOGUE["expert_ids_shifted"].repair
    assert repair is not None
    repair(repaired, config_of(tensors), offset=2)
    change = CATALOGUE["expert_ids_shifted"].with_parameters({"offset": 1}).change
    with torch.no_grad():
        right, found = evaluate(tensors)[Site.OUTPUT], evaluate(repaired).changed(change)[Site.OUTPUT]
    assert (found - right).norm() > 1e-2 * right.norm()


@pytest.mark.parametrize("name", [name for family, name in REPAIRED if family is MINIMAX_M2])
def test_lines_do_what_the_repair_does(name: str, tensors: LayerTensors) -> None:
    parameters = PARAMETERS.get(name, {})
    repair = CATALOGUE[name].repair
    assert repair is not None
    lines = repair_lines(repair, parameters, MINIMAX_M2)
    assert all(len(line) <= 110 for line in lines)
    by_edit, by_lines = tensors.copy(), tensors.copy()
    repair(by_edit, config_of(tensors), **parameters)
    # As pasted into a port whose file imports torch and nothing else.
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join(lines_for_layers(lines, (0,), num_layers=1, has_conversion=False)), names)
    names["convert_state_dict"](None, by_lines, config_of(tensors), 0)
    assert all(by_edit[key].equal(by_lines[key]) for key in tensors)
    assert any(not by_edit[key].equal(tensors[key]) for key in tensors)


LINES = ("for name in names:", "    tensors[name] = -tensors[name]")


def test_lines_have_a_condition_for_some_layers_alone() -> None:
    assert lines_for_layers(LINES, (5,), num_layers=8)[0] == "if layer_idx == 5:"
    condition, _, negated = lines_for_layers(LINES, (1, 5), num_layers=8)
    assert condition == "if layer_idx in (1, 5):"
    assert negated == "        tensors[name] = -tensors[name]"
    assert lines_for_layers(LINES, (0, 1), num_layers=2) == LINES
    # A port without a conversion gets a whole one.
    first, second, *_, last = lines_for_layers(LINES, (0, 1), num_layers=2, has_conversion=False)
    assert first == "def convert_state_dict(self, tensors, config, layer_idx):"
    assert (second, last) == ("    for name in names:", "    return tensors")


def negate(tensors: Any, config: Any, *, name: str, scale: float) -> None:
    """Turn the sign of a tensor."""
    for _ in range(1):
        tensors[name] = -scale * tensors[name]
    # The last statement ends here.
    assert config is None


def test_lines_are_the_parameters_and_what_was_run() -> None:
    lines = repair_lines(negate, {"name": "a", "scale": 2.0}, MINIMAX_M2)
    assert lines == (
        "name = 'a'",
        "scale = 2.0",
        "for _ in range(1):",
        "    tensors[name] = -scale * tensors[name]",
        "# The last statement ends here.",
        "assert config is None",
    )
    tensors = {"a": torch.ones(1)}
    exec("\n".join(lines), {"tensors": tensors, "config": None})
    assert float(tensors["a"]) == -2.0


@pytest.mark.parametrize(
    "text", ["gate_up_swapped", "k_norm_scaled,factor=0.353553", "q_heads_interleaved,order=by group"]
)
def test_text_is_read_and_written_alike(text: str) -> None:
    assert str(Undo.parse(text)) == text


def test_fitted_parameter_is_rounded_to_what_can_be_read() -> None:
    assert str(Undo("k_norm_scaled", (("factor", 8**-0.5),))) == "k_norm_scaled,factor=0.353553"


def test_mistake_of_some_experts_is_not_undone_in_the_weights() -> None:
    assert Undo.parse("gate_up_swapped").is_in_weights(ModelGraph())
    # The weight is not what the norm multiplies by.
    factor = Undo.parse("k_norm_scaled,factor=0.5")
    assert [factor.is_in_weights(ModelGraph(has_gain_of_one_plus=one)) for one in (False, True)] == [
        True,
        False,
    ]
    some = Undo.parse("gate_up_swapped,experts=0-2 5")
    assert (
        some.is_in_weights(ModelGraph()),
        some.lines(MINIMAX_M2),
        some.hypothesis.change.recipe.experts,
    ) == (
        False,
        (),
        {0, 1, 2, 5},
    )


def test_lines_begin_with_the_parameters() -> None:
    assert Undo.parse("k_norm_scaled,factor=0.5").lines(MINIMAX_M2)[0] == "factor = 0.5"
    assert Undo.parse("router_softmax").lines(MINIMAX_M2) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("too_many_cooks", "no mistake is called 'too_many_cooks'"),
        ("gate_up_swap", "Did you mean gate_up_swapped or mlp_gate_up_swapped?"),
        ("k_norm_scaled", "expected factor, found none"),
        ("router_softmax,factor=2", "expected none, found factor=2"),
        ("k_norm_scaled,factor", "cannot be read"),
    ],
)
def test_what_the_catalogue_lacks_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        Undo.parse(text)
    assert message in str(error.value)


def test_two_mistakes_of_a_finding_are_told_apart() -> None:
    parameters = {"qk_norm_per_rank.tp_degree": 2, "moe_delta_scaled.factor": 2.0}
    first, second = undo_finding("qk_norm_per_rank + moe_delta_scaled", parameters)
    assert (str(first), str(second)) == ("qk_norm_per_rank,tp_degree=2", "moe_delta_scaled,factor=2.0")
    assert join_hypotheses((first, second)).sites == {Site.Q_NORM, Site.K_NORM, Site.MOE_DELTA}
