from __future__ import annotations

from typing import Any

import pytest
import torch

from minimax_tools.errors import BackendError, UsageError
from minimax_tools.model.span import Span
from minimax_tools.split.parts import Part, Role, choose_devices, plan_parts


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


@pytest.mark.parametrize("points", [(0, 1), (1, 1), (2, 1), (1, 3), (True, 2), (1, 2.0)])
def test_component_without_layers_is_refused(points: Any) -> None:
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


@pytest.mark.parametrize(
    ("num_gpus", "devices"),
    [
        (0, ["cpu", "cpu", "cpu"]),
        (1, ["cpu", "cuda:0", "cuda:0"]),
        (2, ["cpu", "cuda:0", "cuda:1"]),
        (3, ["cuda:0", "cuda:1", "cuda:2"]),
        (8, ["cuda:0", "cuda:1", "cuda:2"]),
    ],
)
def test_auto_gives_the_trunk_a_gpu_first(num_gpus: int, devices: list[str]) -> None:
    chosen = choose_devices("cpu", "auto", num_gpus=num_gpus)
    assert [str(device) for device in chosen.values()] == devices


def test_one_device_serves_all_where_there_is_no_map() -> None:
    assert set(choose_devices("cuda", None, num_gpus=1).values()) == {torch.device("cuda:0")}


def test_map_names_each_component_by_text_or_role() -> None:
    chosen = choose_devices(
        "cpu", {Role.BOTTOM: "cpu", "trunk": torch.device("cuda:1"), "top": "cuda"}, num_gpus=2
    )
    assert [str(chosen[role]) for role in Role] == ["cpu", "cuda:1", "cuda:0"]


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ("balanced", "found 'balanced'"),
        ({"bottom": "cpu", "trunk": "cpu"}, "device_map cannot be used"),
        ({"bottom": "cpu", "trunk": "gpu:0", "top": "cpu"}, "'gpu:0', given for trunk, is not a device"),
        ({"bottom": "meta", "trunk": "cpu", "top": "cpu"}, "bottom cannot be on the meta device"),
    ],
)
def test_map_that_is_not_whole_is_refused(device_map: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_devices("cpu", device_map, num_gpus=0)
    assert message in str(caught.value)


def test_gpu_that_is_not_here_is_refused() -> None:
    with pytest.raises(
        BackendError, match="there is no cuda:2, which trunk should go to: found 2 CUDA devices"
    ):
        choose_devices("cpu", {"bottom": "cpu", "trunk": "cuda:2", "top": "cpu"}, num_gpus=2)


def test_model_of_more_layers_than_any_has_is_not_built() -> None:
    with pytest.raises(
        UsageError, match=r"a model of 1000.* layers cannot be split: expected at most 1048576"
    ):
        Part(role=Role.BOTTOM, span=Span(0, 1), num_hidden_layers=10**400)
