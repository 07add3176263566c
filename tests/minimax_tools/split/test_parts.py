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
    assert [str(part) for part in parts] == [
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
    ("role", "span", "num_layers", "fault"),
    [
        (Role.BOTTOM, Span(1, 2), 4, "cannot be the bottom of a model of 4 layers"),
        (Role.BOTTOM, Span(0, 4), 4, "cannot be the bottom of a model of 4 layers"),
        (Role.TRUNK, Span(0, 2), 4, "cannot be the trunk of a model of 4 layers"),
        (Role.TRUNK, Span(2, 4), 4, "cannot be the trunk of a model of 4 layers"),
        (Role.TOP, Span(1, 3), 4, "cannot be the top of a model of 4 layers"),
        (Role.TOP, Span(2, 6), 4, "layer 5 is out of range"),
        (
            Role.BOTTOM,
            Span(0, 1),
            10**400,
            r"a model of 1000.* layers cannot be split: expected at most 1048576",
        ),
    ],
)
def test_layers_that_no_such_component_has_are_refused(
    role: Role, span: Span, num_layers: int, fault: str
) -> None:
    with pytest.raises(UsageError, match=fault):
        Part(role=role, span=span, num_hidden_layers=num_layers)


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


def test_map_names_each_component_and_without_one_a_device_serves_all() -> None:
    assert set(choose_devices("cuda", None, num_gpus=1).values()) == {torch.device("cuda:0")}
    by_text_or_role: Any = {Role.BOTTOM: "cpu", "trunk": torch.device("cuda:1"), "top": "cuda"}
    chosen = choose_devices("cpu", by_text_or_role, num_gpus=2)
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
    fault = "there is no cuda:2, which trunk should go to: found 2 CUDA devices"
    with pytest.raises(BackendError, match=fault):
        choose_devices("cpu", {"bottom": "cpu", "trunk": "cuda:2", "top": "cpu"}, num_gpus=2)
