from __future__ import annotations

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.model.span import Span
from minimax_tools.split.parts import Part, Role, plan_parts


def test_three_components_hold_every_layer_once() -> None:
    parts = plan_parts(8, 24, num_hidden_layers=28)
    assert [part.role for part in parts] == [Role.BOTTOM, Role.TRUNK, Role.TOP]
    assert [layer for part in parts for layer in part.layers] == list(range(28))
    assert [part.has_embedding for part in parts] == [True, False, False]
    assert [part.has_head for part in parts] == [False, False, True]


def test_words_name_layers_and_what_comes_with_them() -> None:
    assert [str(part) for part in plan_parts(8, 24, num_hidden_layers=28)] == [
        "bottom (layers 0-7 + embedding)",
        "trunk (layers 8-23)",
        "top (layers 24-27 + final norm + lm_head)",
    ]
    assert str(plan_parts(1, 2, num_hidden_layers=3)[1]) == "trunk (layer 1)"


@pytest.mark.parametrize("points", [(0, 1), (1, 1), (2, 1), (1, 3), (1, 4)])
def test_component_without_layers_is_refused(points: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="0 < split_point_1 < split_point_2 < 3"):
        plan_parts(*points, num_hidden_layers=3)


@pytest.mark.parametrize(
    ("role", "start", "stop"),
    [(Role.BOTTOM, 1, 2), (Role.BOTTOM, 0, 4), (Role.TRUNK, 0, 2), (Role.TRUNK, 2, 4), (Role.TOP, 1, 3)],
)
def test_component_with_another_ones_layers_is_refused(role: Role, start: int, stop: int) -> None:
    with pytest.raises(UsageError, match=f"cannot be the {role} of a model of 4 layers"):
        Part(role=role, span=Span(start, stop), num_hidden_layers=4)


def test_layers_past_the_last_are_refused() -> None:
    with pytest.raises(UsageError, match="layer 5 is out of range"):
        Part(role=Role.TOP, span=Span(2, 6), num_hidden_layers=4)
