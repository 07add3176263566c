"""`.pt` files as older tools wrote them."""

from __future__ import annotations

import json
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.errors import CheckpointError
from minimax_tools.split.components import SplitModel
from minimax_tools.split.factory import ModelFactory

SPANS = {"bottom": (0, 1), "trunk": (1, 3), "top": (3, 4)}
Split = Callable[[str], tuple[Any, dict[str, SplitModel]]]


@pytest.fixture(scope="module")
def split(make: Callable[..., Any]) -> Split:
    """A tiny model and its components by name, made once."""
    done: dict[str, tuple[Any, dict[str, SplitModel]]] = {}

    def run(model_type: str) -> tuple[Any, dict[str, SplitModel]]:
        if model_type not in done:
            made = make(model_type)
            parts = ModelFactory.create_split_models(model_type, str(made.folder), 1, 3)
            done[model_type] = made, dict(zip(SPANS, parts, strict=True))
        return done[model_type]

    return run


@pytest.fixture
def bottom(split: Split) -> dict[str, Any]:
    """Content of a file of gpt2's bottom."""
    made, parts = split("gpt2")
    return {**facts(made, "bottom"), "state_dict": state_dict(made, parts, "bottom")}


def facts(made: Any, role: str) -> dict[str, Any]:
    start, end = SPANS[role]
    config = json.loads(made.model.config.to_json_string(use_diff=False))
    return {"component": role, "start_layer": start, "end_layer": end, "config": config}


def state_dict(
    made: Any, parts: dict[str, SplitModel], role: str, *, renumbered: bool = True
) -> dict[str, torch.Tensor]:
    """A component's tensors, the base model's prefix left out."""
    prefix, start = made.model.base_model_prefix + ".", SPANS[role][0]
    found = {}
    for name, tensor in parts[role].model.state_dict().items():
        segments = name.removeprefix(prefix).split(".")
        if renumbered and segments[0] in ("layers", "h"):
            segments[1] = str(int(segments[1]) - start)
        found[".".join(segments)] = tensor.clone()
    return found


def load(content: Any, path: Path) -> SplitModel:
    torch.save(content, path)
    return SplitModel.load(path)


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2", "mixtral"])
@pytest.mark.parametrize("layout", ["layers from zero", "own numbers", "metadata beside it"])
def test_components_of_files_chain_to_the_whole_models_logits(
    model_type: str, layout: str, split: Split, chain: Any, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    made, parts = split(model_type)
    loaded = []
    for role in SPANS:
        content: Any = state_dict(made, parts, role, renumbered=layout != "own numbers")
        if layout == "metadata beside it":
            (tmp_path / f"{role}_metadata.json").write_text(json.dumps(facts(made, role)))
        else:
            content = {**facts(made, role), "model_state_dict": content}
        loaded.append(load(content, tmp_path / f"{role}.pt"))
    assert torch.equal(chain(loaded, input_ids, None), made.logits(input_ids, None))


def as_an_object(config: dict[str, Any]) -> Any:
    from transformers import GPT2Config

    made = GPT2Config(**{**config, "model_type": "gpt2"})
    made.__dict__["model_type"] = "gpt2"
    return made


def without_end(config: dict[str, Any]) -> dict[str, Any]:
    circle: list[Any] = []
    circle.extend([circle] * 3)
    lists: list[Any] = [[]]
    for _ in range(60):
        lists.append([lists[-1]] * 3)  # 3 ** 60 items, seen one by one
    return {**config, "circle": circle, "shared": lists[-1]}


@pytest.mark.parametrize("change", [as_an_object, without_end, dict])
def test_config_of_another_form_and_file_of_any_suffix_are_read(
    change: Callable[[dict[str, Any]], Any], bottom: dict[str, Any], input_ids: torch.Tensor, tmp_path: Path
) -> None:
    loaded = load({**bottom, "config": change(bottom["config"])}, tmp_path / "bottom.ckpt")
    with torch.no_grad():
        assert loaded(input_ids).shape == (2, 9, 32)


def test_file_comes_before_the_folder_of_its_name(
    split: Split, bottom: dict[str, Any], tmp_path: Path
) -> None:
    split("gpt2")[1]["trunk"].save(tmp_path / "bottom")
    assert load(bottom, tmp_path / "bottom.pt").part.role == "bottom"
    (tmp_path / "bottom.pt").unlink()
    assert SplitModel.load(tmp_path / "bottom.pt").part.role == "trunk"


class Trap:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return subprocess.call, (["touch", str(self._mark)],)


@pytest.mark.parametrize("place", ["config", "state_dict", "beside", "alone"])
def test_nothing_in_a_malicious_file_is_called(bottom: dict[str, Any], tmp_path: Path, place: str) -> None:
    mark = tmp_path / "mark"
    content: Any = bottom
    if place == "alone":
        content = Trap(mark)
    elif place == "state_dict":
        content["state_dict"]["wte.weight"] = Trap(mark)
    else:
        content[place] = Trap(mark)
    if place == "beside":
        # It is no more than a record that nobody asks for.
        assert load(content, tmp_path / "bottom.pt").part.role == "bottom"
    else:
        with pytest.raises(CheckpointError):
            load(content, tmp_path / "bottom.pt")
    assert not mark.exists()
    # The trap does work where a file is unpickled.
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"component": "middle"}, "does not name its component"),
        ({"component": None}, "does not name its component"),
        ({"start_layer": "0"}, "does not name its component"),
        ({"end_layer": None}, "does not name its component"),
        ({"config": 7}, "does not name its component"),
        ({"config": {"model_type": "unheard-of"}}, "the config in .* cannot be used"),
        ({"end_layer": 4}, "contradicts itself"),
        ({"end_layer": 2}, "h.1.ln_1.weight: found nothing"),
        ({"state_dict": {"wpe.weight": torch.ones(2, 2)}}, "transformer.h.0.ln_1.weight: found nothing"),
    ],
)
def test_file_that_contradicts_itself_is_refused(
    bottom: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load({**bottom, **change}, tmp_path / "bottom.pt")


def test_file_that_torch_did_not_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bottom.pt").write_bytes(b"no such thing")
    with pytest.raises(CheckpointError, match="bottom.pt"):
        SplitModel.load(tmp_path / "bottom.pt")


def test_bare_state_dict_with_no_or_damaged_metadata_is_refused(
    bottom: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="bottom_metadata.json beside it"):
        load(bottom["state_dict"], tmp_path / "bottom.pt")
    for text in ("{", "[1]", "3", "null"):
        (tmp_path / "bottom_metadata.json").write_text(text)
        with pytest.raises(CheckpointError, match="bottom_metadata.json cannot be read"):
            SplitModel.load(tmp_path / "bottom.pt")
