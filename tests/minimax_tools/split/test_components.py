from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.split.components import SplitModel
from minimax_tools.split.factory import ModelFactory

Parts = tuple[SplitModel, SplitModel, SplitModel]


@pytest.fixture(scope="module")
def made(make: Callable[..., Any]) -> Any:
    return make("minimax_m2")


@pytest.fixture(scope="module")
def parts(made: Any) -> Parts:
    return ModelFactory.create_split_models("minimax_m2", str(made.folder), 1, 3)


def test_repr_tells_component_model_dtype_size_and_device(parts: Parts) -> None:
    assert repr(parts[1]) == "SplitModel(trunk (layers 1-2), minimax_m2, bfloat16, 218.4 kB on cpu)"


def test_positions_are_those_given(made: Any, parts: Parts, input_ids: torch.Tensor) -> None:
    position_ids = torch.arange(9)[None] * 3 + 5
    states = input_ids
    with torch.no_grad():
        for part in parts:
            states = part(states, position_ids=position_ids)
        expected = made.model(input_ids, position_ids=position_ids).logits
        counted = made.model(input_ids).logits
    assert torch.equal(states, expected)
    assert not torch.equal(states, counted)


def test_gradients_flow_through_all_components(parts: Parts, input_ids: torch.Tensor) -> None:
    bottom, trunk, top = parts
    top(trunk(bottom(input_ids))).float().sum().backward()
    gradient = bottom.model.get_input_embeddings().weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0
    for part in parts:
        part.zero_grad()


@pytest.mark.parametrize(
    ("role", "inputs", "message"),
    [
        (0, torch.zeros(2, 9, 32, dtype=torch.bfloat16), "bottom takes token ids"),
        (0, torch.zeros(2, 9), "bottom takes token ids"),
        (0, torch.zeros(9, dtype=torch.long), "bottom takes token ids"),
        (1, torch.zeros(2, 9, dtype=torch.long), "trunk takes hidden states"),
        (1, torch.zeros(2, 9, 31, dtype=torch.bfloat16), r"\[batch, sequence, 32\]"),
        (2, torch.zeros(2, 9, 32), "top takes hidden states .* of torch.bfloat16, not torch.float32"),
    ],
)
def test_what_a_component_cannot_take_is_refused(
    parts: Parts, role: int, inputs: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parts[role](inputs)


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_mask_and_positions_must_fit_the_inputs(parts: Parts, input_ids: torch.Tensor, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is \[2, 8\], expected \[2, 9\]"):
        parts[0](input_ids, **{name: torch.ones(2, 8, dtype=torch.long)})


def test_nothing_there_is_no_component(parts: Parts, tmp_path: Path) -> None:
    parts[1].save(tmp_path / "trunk")
    # Another suffix is not taken for the folder's.
    for name in ("bottom", "bottom.pt", "trunk.safetensors"):
        with pytest.raises(CheckpointError, match="no such folder"):
            SplitModel.load(tmp_path / name)


@pytest.mark.gpu
def test_hidden_states_move_to_the_components_device(
    made: Any, chain: Any, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    device_map = {"bottom": "cpu", "trunk": "cuda:0", "top": "cpu"}
    parts = ModelFactory.create_split_models("minimax_m2", str(made.folder), 1, 3, device_map=device_map)
    assert [part.device.type for part in parts] == ["cpu", "cuda", "cpu"]
    logits = chain(parts, input_ids, mask)
    assert logits.device.type == "cpu"
    torch.testing.assert_close(logits, made.logits(input_ids, mask), atol=0.1, rtol=0.05)
    parts[1].save(tmp_path / "trunk")
    loaded = SplitModel.load(tmp_path / "trunk", device="cuda:0")
    assert torch.equal(chain((parts[0], loaded, parts[2]), input_ids, mask), logits)


@pytest.mark.parametrize("name", ["bottom.pt", "bottom.pth", "bottom.bin", "bottom.safetensors"])
def test_a_component_is_not_saved_under_a_files_name(name: str, parts: Parts, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{name} is the name of a file.*Save it to .*bottom'"):
        parts[0].save(tmp_path / name)
    assert not list(tmp_path.iterdir())
    # The advice: the folder is found by the old name.
    parts[0].save(tmp_path / "bottom")
    assert SplitModel.load(tmp_path / "bottom.pt").part == parts[0].part
