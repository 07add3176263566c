from __future__ import annotations

from typing import Any

import pytest
import torch

from minimax_tools.errors import BackendError, UsageError
from minimax_tools.split.devices import auto_device_map, choose_devices
from minimax_tools.split.parts import Role


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
    assert list(auto_device_map(num_gpus)) == [Role.BOTTOM, Role.TRUNK, Role.TOP]
    assert list(auto_device_map(num_gpus).values()) == devices
    chosen = choose_devices("cpu", "auto", num_gpus=num_gpus)
    assert [str(device) for device in chosen.values()] == devices


def test_less_than_no_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="num_gpus is -1"):
        auto_device_map(-1)


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
        (["cpu"] * 3, "device_map is neither a map nor a rule"),
        ({"bottom": "cpu", "trunk": "cpu"}, "no device for top"),
        ({"bottom": "cpu", "trunk": "cpu", "top": "cpu", "head": "cpu"}, "unknown key 'head'"),
        ({"Bottom": "cpu", "trunk": "cpu", "top": "cpu"}, "no device for bottom; unknown key 'Bottom'"),
        ({"bottom": "cpu", "trunk": "gpu:0", "top": "cpu"}, "'gpu:0', given for trunk, is no device"),
        ({"bottom": None, "trunk": "cpu", "top": "cpu"}, "None, given for bottom, is no device"),
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
