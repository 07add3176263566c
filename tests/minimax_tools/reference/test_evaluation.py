"""Evaluation: which nodes are computed, and from what, when stages of a small layer are replaced."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import (
    Change,
    Evaluation,
    ExpertValue,
    GraphNode,
    LayerInputs,
    Stage,
    choice_rows,
    finite_padding,
    replace_stage,
    scaled,
    with_given,
)
from minimax_tools.reference.expert_pass import Recipe

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
# Of six tokens one is padding.
REAL = torch.tensor([0, 1, 2, 3, 4])
Q_NORM, Q_PROJ, K_PROJ = Site.Q_NORM, Site.Q_PROJ, Site.K_PROJ
CONTEXT, DELTA = Site.ATTN_CONTEXT, Site.ATTN_DELTA


class Layer:
    """A layer of five nodes, which notes what it computes."""

    def __init__(self) -> None:
        self.computed: list[GraphNode] = []
        parts: dict[str, Any] = {"spec": "spec", "weights": "weights"}
        self.inputs = LayerInputs(
            graph=ModelGraph().layer(0), attention_mask=MASK, position_ids=MASK, decode_start=3, **parts
        )
        whole = torch.arange(12.0).reshape(2, 3, 2)
        stages: dict[GraphNode, Stage] = {
            Q_PROJ: lambda layer: layer.inputs.held(whole),
            K_PROJ: lambda layer: -layer.inputs.held(whole),
            Q_NORM: lambda layer: layer[Q_PROJ] + 1.0,
            CONTEXT: lambda layer: layer.chosen(layer[Q_NORM] + layer[K_PROJ]),
            DELTA: lambda layer: 2.0 * layer[CONTEXT],
        }
        self.stages = {node: self.noting(node, stage) for node, stage in stages.items()}

    def noting(self, node: GraphNode, stage: Stage) -> Stage:
        def run(layer: Evaluation) -> torch.Tensor:
            self.computed.append(node)
            return stage(layer)

        return run

    def base(self, tokens: torch.Tensor = REAL) -> Evaluation:
        return Evaluation(self.inputs, self.stages, tokens=tokens)


def test_each_node_is_computed_once_when_it_is_asked_for_and_again_behind_a_change() -> None:
    layer = Layer()
    base = layer.base()
    assert layer.computed == []
    assert base[DELTA].tolist() == [[2.0, 2.0]] * 5
    assert base[DELTA] is base[DELTA]
    assert sorted(layer.computed, key=str) == sorted((Q_PROJ, K_PROJ, Q_NORM, CONTEXT, DELTA), key=str)
    layer.computed.clear()
    changed = base.changed(replace_stage(Q_NORM, lambda found: found[Q_PROJ] + 3.0))
    assert changed[DELTA].tolist() == [[6.0, 6.0]] * 5
    assert layer.computed == [DELTA, CONTEXT]
    assert changed[Q_PROJ] is base[Q_PROJ]
    assert base[DELTA].tolist() == [[2.0, 2.0]] * 5
    assert changed.base is base
    nodes = (Q_PROJ, K_PROJ, Q_NORM, CONTEXT, DELTA, Site.OUTPUT)
    assert [node for node in nodes if changed.is_affected(node)] == [Q_NORM, CONTEXT, DELTA, Site.OUTPUT]
    assert not base.is_affected(DELTA)


def test_rows_are_those_of_the_chosen_tokens_with_their_heads_side_by_side() -> None:
    layer = Layer()
    heads = torch.arange(24.0).reshape(2, 2, 3, 2)
    layer.stages[Site.Q_ROPE] = lambda _: heads
    base = layer.base(torch.tensor([4, 1]))
    assert base.rows(Q_PROJ).tolist() == [[8.0, 9.0], [2.0, 3.0]]
    assert base.rows(DELTA).shape == (2, 2)
    assert base.chosen(torch.arange(6).reshape(2, 3, 1)).tolist() == [[4], [1]]
    assert base.rows(Site.Q_ROPE)[0].tolist() == [*heads[1, 0, 1].tolist(), *heads[1, 1, 1].tolist()]


def test_other_value_at_a_node_keeps_the_change() -> None:
    changed = Layer().base().changed(replace_stage(Q_NORM, lambda found: found[Q_PROJ] + 3.0))
    other = changed.with_value(DELTA, torch.full((5, 2), 9.0))
    assert other[DELTA].tolist() == [[9.0, 9.0]] * 5
    assert other[CONTEXT].tolist() == [[3.0, 3.0]] * 5
    changed.set_value(CONTEXT, torch.zeros(5, 2))
    assert changed[DELTA].tolist() == [[0.0, 0.0]] * 5


def test_some_tokens_keep_the_values_that_are_known() -> None:
    layer = Layer()
    base = layer.base()
    known = base[CONTEXT]
    layer.computed.clear()
    few = base.select_tokens(torch.tensor([3, 0]))
    assert few.tokens.tolist() == [3, 0]
    assert few[CONTEXT].tolist() == known[[3, 0]].tolist()
    assert few[Q_NORM] is base[Q_NORM]
    assert layer.computed == []
    assert few[DELTA].shape == (2, 2)


def test_tokens_of_some_rows_need_no_other_rows() -> None:
    layer = Layer()
    base = layer.base()
    few = base.select_tokens(torch.tensor([4, 3]))
    assert few.attention_mask.tolist() == [[1, 1, 0]]
    assert few.tokens.tolist() == [1, 0]
    assert few.places.tolist() == [4, 3]
    assert few.rows(Q_PROJ).tolist() == base.rows(Q_PROJ)[[4, 3]].tolist()
    # What mixes rows reads the whole batch.
    assert few.everywhere() is base.everywhere()


@pytest.mark.parametrize(
    ("calls", "sources"),
    [((), [2, 1, 0, -1]), (((0, 1), (2, 3)), [1, 0, 3, 2]), (((0, 1), (2, 0)), [2, 0, 0, -1])],
)
def test_tokens_are_exchanged_within_a_call(calls: tuple[tuple[int, ...], ...], sources: list[int]) -> None:
    ones = torch.ones(len(sources), 1, dtype=torch.int64)
    rows = replace(Layer().inputs, attention_mask=ones, calls=calls)

    def reversed_rows(num_rows: int, length: int) -> torch.Tensor:
        assert length == 1
        return torch.tensor({4: [2, 1, 0, -1], 2: [1, 0]}[num_rows])

    assert rows.sources(reversed_rows).tolist() == sources


def test_experts_and_their_weights_are_told_by_expert_in_any_order() -> None:
    experts, weights = torch.tensor([[2, 0], [1, 3]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    expected = [[0.75, 0.0, 0.25, 0.0], [0.0, 0.5, 0.0, 0.5]]
    for chosen, shares in ((experts, weights), (experts.flip(1), weights.flip(1))):
        assert choice_rows(chosen, shares, 4).tolist() == expected
    assert choice_rows(experts, None, 4).tolist() == [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]]


def test_all_tokens_are_computed_with_padding() -> None:
    layer = Layer()
    base = layer.base()
    assert base[CONTEXT].shape == (5, 2)
    whole = base.everywhere()
    assert whole.tokens.tolist() == list(range(6))
    assert whole[CONTEXT].shape == (6, 2)
    assert whole[Q_NORM] is base[Q_NORM]
    assert base.everywhere() is whole


def test_values_of_a_layer_are_freed_with_it_and_not_by_a_collection_of_garbage() -> None:
    base = Layer().base()
    base[DELTA]
    changed = base.changed(scaled(DELTA, 2.0))
    kept = weakref.ref(base)
    gc.disable()
    try:
        del base
        assert kept() is not None, "a change reads its base"
        del changed
        assert kept() is None
    finally:
        gc.enable()


class TestRecipe:
    """A change of the experts' matrices."""

    RECIPE, OTHER = Recipe(changed=("w1",)), Recipe(changed=("w2",))

    def test_is_that_of_the_last_change_that_has_one_or_of_the_base(self) -> None:
        base, change = Layer().base(), Change(recipe=self.RECIPE)
        assert base.changed(change).recipe is self.RECIPE
        assert base.changed(change).changed(Change()).recipe is self.RECIPE
        assert base.changed(Change()).recipe.changed == ()
        assert change.and_also(Change()).recipe is self.RECIPE
        assert Change().and_also(change).recipe is self.RECIPE
        assert change.and_also(Change(recipe=self.OTHER)).recipe is self.OTHER

    def test_changes_the_experts_and_what_follows(self) -> None:
        change = Change(recipe=self.RECIPE)
        assert (change.nodes, change.sites) == ({ExpertValue.EXPERT_OUTPUTS}, {Site.MOE_DELTA})
        changed = Layer().base().changed(change)
        assert changed.is_affected(ExpertValue.EXPERT_OUTPUTS)
        assert changed.is_affected(Site.OUTPUT)
        assert not changed.is_affected(Site.ROUTER_WEIGHTS)

    def test_experts_are_run_on_the_nodes_of_their_own(self) -> None:
        layer = Layer()
        nodes = (ExpertValue.EXPERT_INPUT, ExpertValue.EXPERT_NUMBERS, Site.ROUTER_WEIGHTS)
        for value, node in enumerate(nodes):
            layer.stages[node] = lambda _, value=value: torch.tensor(value)  # type: ignore[misc]
        job = layer.base().changed(Change(recipe=self.RECIPE)).expert_job()
        assert (int(job.states), int(job.experts), int(job.shares)) == (0, 1, 2)
        assert job.recipe is self.RECIPE


def test_scaled_site_is_its_own_stage_times_a_factor() -> None:
    layer = Layer()
    layer.stages[Site.ATTN_RESIDUAL] = lambda _: torch.full((5, 2), 3.0)
    layer.stages[Site.MOE_DELTA] = lambda _: torch.full((5, 2), 1.0)
    layer.stages[Site.OUTPUT] = lambda _: torch.zeros(5, 2)
    changed = layer.base().changed(scaled(Site.OUTPUT, 0.5))
    assert changed[Site.OUTPUT].tolist() == [[2.0, 2.0]] * 5


def test_later_stage_counts_of_two_changes_and_experts_show_at_their_sum() -> None:
    first, second = replace_stage(Q_PROJ, lambda _: torch.zeros(1)), scaled(Q_PROJ, 2.0)
    assert first.and_also(second).stages[Q_PROJ] is second.stages[Q_PROJ]
    other, experts = (
        replace_stage(node, lambda _: torch.zeros(1)) for node in (K_PROJ, ExpertValue.EXPERT_NUMBERS)
    )
    assert first.and_also(other).sites == {Q_PROJ, K_PROJ}
    assert experts.sites == {Site.MOE_DELTA}
    assert Change().sites == frozenset()


def test_given_sites_stand_in_for_their_stages() -> None:
    whole, later = torch.ones(2, 3, 2), torch.arange(12.0).reshape(2, 3, 2)
    base = Evaluation(Layer().inputs, with_given({Q_PROJ: whole, DELTA: later}), tokens=REAL)
    assert base[Q_PROJ] is whole
    assert base.select_tokens(torch.tensor([4]))[DELTA].tolist() == [later[1, 1].tolist()]
    # Behind attention there are the chosen tokens alone.
    assert base[DELTA].tolist() == later.flatten(0, 1)[REAL].tolist()


def test_given_padding_is_made_finite_and_else_kept() -> None:
    values = torch.arange(12.0).reshape(2, 3, 2).bfloat16()
    values[1, 2] = torch.tensor([torch.nan, 5.0])
    values[0, 0, 0], values[0, 0, 1] = torch.nan, torch.inf
    found = finite_padding(values, Q_PROJ, MASK)
    assert found.dtype == torch.float32
    assert found[1, 2].tolist() == [0.0, 5.0]
    assert bool(found[0, 0, 0].isnan())
    assert float(found[0, 0, 1]) == float("inf")
    values[1, 2] = torch.tensor([torch.inf, -torch.inf])
    assert finite_padding(values, Q_PROJ, MASK)[1, 2].tolist() == [0.0, 0.0]
    experts = finite_padding(torch.full((2, 3, 4), 7, dtype=torch.int32), Site.ROUTER_EXPERTS, MASK)
    assert (experts.dtype, experts[1, 2].tolist()) == (torch.int64, [0] * 4)
    assert int((experts == 7).sum()) == 20
