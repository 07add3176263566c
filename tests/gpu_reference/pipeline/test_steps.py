"""The steps of every rank, decided from what is stored."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_reference.pipeline.pipeline import Step, plan_steps
from minimax_tools.partition.node import Node, Stage


def stage(layers: range, *, has_embedding: bool = False, has_head: bool = False) -> Stage:
    node = Node(name="x", memory_bytes=1)
    return Stage(node=node, layers=layers, has_embedding=has_embedding, has_head=has_head)


TWO = (stage(range(2), has_embedding=True), stage(range(2, 4), has_head=True))


@pytest.mark.parametrize(
    ("complete", "has_model_sites", "expected"),
    [
        ((), False, [(range(2), False, "tokens", True), (range(2, 4), True, "rank", False)]),
        ((0,), False, [(range(1, 2), False, "stored", True), (range(2, 4), True, "rank", False)]),
        ((0, 1), False, [(range(2, 2), False, "stored", False), (range(2, 4), True, "stored", False)]),
        ((2, 3), False, [(range(2), False, "tokens", False), (range(4, 4), True, "stored", False)]),
        ((0, 1, 2, 3), True, [(range(2, 2), False, "stored", False), (range(4, 4), False, "stored", False)]),
        ((2,), True, [(range(2), False, "tokens", False), (range(3, 4), False, "stored", False)]),
    ],
)
def test_layers_whose_input_is_stored_wait_for_nobody(
    complete: tuple[int, ...], has_model_sites: bool, expected: list[Any]
) -> None:
    steps = plan_steps(TWO, complete, has_model_sites=has_model_sites)
    assert [(step.layers, step.runs_head, step.source, step.passes_on) for step in steps] == expected


def test_rank_without_layers_hands_on_what_the_next_needs() -> None:
    stages = (stage(range(0), has_embedding=True), stage(range(3)), stage(range(3, 3), has_head=True))
    steps = plan_steps(stages, (), has_model_sites=False)
    assert [step.passes_on for step in steps] == [True, True, False]
    assert [step.source for step in steps] == ["tokens", "rank", "rank"]
    assert all(step.is_idle for step in plan_steps(stages, (0, 1, 2), has_model_sites=True))
    assert plan_steps(stages, (0, 1, 2), has_model_sites=False)[2] == Step(
        layers=range(3, 3), runs_head=True, source="stored", passes_on=False
    )
