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
Save = Callable[..., Path]


@pytest.fixture(params=["gpt2", "qwen2", "mixtral"])
def made(make: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    return make(request.param)


@pytest.fixture
def whole(make: Callable[..., Any]) -> Any:
    return make("gpt2")


def facts(made: Any, role: str) -> dict[str, Any]:
    start, end = SPANS[role]
    config = json.loads(made.model.config.to_json_string(use_diff=False))
    return {"component": role, "start_layer": start, "end_layer": end, "config": config}


def state_dict(made: Any, role: str, *, renumbered: bool) -> dict[str, torch.Tensor]:
    """A component's tensors, the base model's prefix left out."""
    roles = zip(SPANS, ModelFactory.create_split_models(made.model_type, str(made.folder), 1, 3), strict=True)
    part = dict(roles)[role]
    prefix, start = made.model.base_model_prefix + ".", SPANS[role][0]
    found = {}
    for name, tensor in part.model.state_dict().items():
        segments = name.removeprefix(prefix).split(".")
        if renumbered and segments[0] in ("layers", "h"):
            segments[1] = str(int(segments[1]) - start)
        found[".".join(segments)] = tensor.clone()
    return found


@pytest.mark.parametrize("renumbered", [True, False], ids=["layers-from-zero", "own-numbers"])
def test_dict_with_everything_in_it_is_read(
    made: Any, chain: Any, input_ids: torch.Tensor, tmp_path: Path, renumbered: bool
) -> None:
    for role in SPANS:
        tensors = state_dict(made, role, renumbered=renumbered)
        torch.save({**facts(made, role), "model_state_dict": tensors}, tmp_path / f"{role}.pt")
    parts = [SplitModel.load(tmp_path / f"{role}.pt") for role in SPANS]
    assert torch.equal(chain(parts, input_ids, None), made.logits(input_ids, None))


def test_state_dict_with_metadata_beside_it_is_read(
    whole: Any, chain: Any, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    for role in SPANS:
        torch.save(state_dict(whole, role, renumbered=True), tmp_path / f"{role}.pt")
        (tmp_path / f"{role}_metadata.json").write_text(json.dumps(facts(whole, role)))
    parts = [SplitModel.load(tmp_path / f"{role}.pt") for role in SPANS]
    assert torch.equal(chain(parts, input_ids, None), whole.logits(input_ids, None))


def test_config_that_is_an_object_is_read_by_its_attributes(
    whole: Any, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    from transformers import GPT2Config

    config = GPT2Config(**{**facts(whole, "bottom")["config"], "model_type": "gpt2"})
    content = {**facts(whole, "bottom"), "config": config}
    content["config"].__dict__["model_type"] = "gpt2"
    torch.save(
        {**content, "state_dict": state_dict(whole, "bottom", renumbered=True)}, tmp_path / "bottom.pt"
    )
    bottom = SplitModel.load(tmp_path / "bottom.pt")
    with torch.no_grad():
        assert bottom(input_ids).shape == (2, 9, 32)


def test_config_values_without_end_are_left_out(whole: Any, input_ids: torch.Tensor, tmp_path: Path) -> None:
    circle: list[Any] = []
    circle.extend([circle] * 3)
    lists: list[Any] = [[]]
    for _ in range(60):
        lists.append([lists[-1]] * 3)  # 3 ** 60 items, seen one by one
    content = facts(whole, "bottom")
    content["config"] |= {"circle": circle, "shared": lists[-1]}
    torch.save(
        {**content, "state_dict": state_dict(whole, "bottom", renumbered=True)}, tmp_path / "bottom.pt"
    )
    with torch.no_grad():
        assert SplitModel.load(tmp_path / "bottom.pt")(input_ids).shape == (2, 9, 32)


def test_file_comes_before_the_folder_of_its_name(whole: Any, tmp_path: Path) -> None:
    parts = ModelFactory.create_split_models("gpt2", str(whole.folder), 1, 3)
    parts[1].save(tmp_path / "bottom")
    content = {**facts(whole, "bottom"), "state_dict": state_dict(whole, "bottom", renumbered=True)}
    torch.save(content, tmp_path / "bottom.pt")
    assert SplitModel.load(tmp_path / "bottom.pt").part.role == "bottom"
    (tmp_path / "bottom.pt").unlink()
    assert SplitModel.load(tmp_path / "bottom.pt").part.role == "trunk"


def test_file_of_any_suffix_is_read(whole: Any, input_ids: torch.Tensor, tmp_path: Path) -> None:
    content = {**facts(whole, "bottom"), "state_dict": state_dict(whole, "bottom", renumbered=True)}
    torch.save(content, tmp_path / "bottom.ckpt")
    with torch.no_grad():
        assert SplitModel.load(tmp_path / "bottom.ckpt")(input_ids).shape == (2, 9, 32)


class Trap:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return subprocess.call, (["touch", str(self._mark)],)


@pytest.mark.parametrize("place", ["config", "state_dict", "beside", "alone"])
def test_nothing_in_a_malicious_file_is_called(whole: Any, tmp_path: Path, place: str) -> None:
    mark = tmp_path / "mark"
    content: Any = {**facts(whole, "bottom"), "state_dict": state_dict(whole, "bottom", renumbered=True)}
    if place == "alone":
        content = Trap(mark)
    elif place == "state_dict":
        content["state_dict"]["wte.weight"] = Trap(mark)
    else:
        content[place] = Trap(mark)
    torch.save(content, tmp_path / "bottom.pt")
    if place == "beside":
        # It is no more than a record that nobody asks for.
        assert SplitModel.load(tmp_path / "bottom.pt").part.role == "bottom"
    else:
        with pytest.raises(CheckpointError):
            SplitModel.load(tmp_path / "bottom.pt")
    assert not mark.exists()
    # The trap does work where a file is unpickled.
    with (tmp_path / "trap.pickle").open("wb") as file:
        pickle.dump(Trap(mark), file)
    pickle.loads((tmp_path / "trap.pickle").read_bytes())
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
    whole: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    content = {**facts(whole, "bottom"), "state_dict": state_dict(whole, "bottom", renumbered=True)}
    torch.save({**content, **change}, tmp_path / "bottom.pt")
    with pytest.raises(CheckpointError, match=message):
        SplitModel.load(tmp_path / "bottom.pt")


def test_file_that_torch_did_not_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bottom.pt").write_bytes(b"no such thing")
    with pytest.raises(CheckpointError, match="bottom.pt"):
        SplitModel.load(tmp_path / "bottom.pt")


def test_bare_state_dict_is_refused_with_what_is_needed(whole: Any, tmp_path: Path) -> None:
    torch.save(state_dict(whole, "bottom", renumbered=True), tmp_path / "bottom.pt")
    with pytest.raises(CheckpointError, match="bottom_metadata.json beside it"):
        SplitModel.load(tmp_path / "bottom.pt")


@pytest.mark.parametrize("text", ["{", "[1]", "3", "null"])
def test_damaged_metadata_is_named(whole: Any, tmp_path: Path, text: str) -> None:
    torch.save(state_dict(whole, "bottom", renumbered=True), tmp_path / "bottom.pt")
    (tmp_path / "bottom_metadata.json").write_text(text)
    with pytest.raises(CheckpointError, match="bottom_metadata.json cannot be read"):
        SplitModel.load(tmp_path / "bottom.pt")
