from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.split.components import SplitModel
from minimax_tools.split.factory import ModelFactory
from minimax_tools.split.part_folder import write_tensors

Parts = tuple[SplitModel, SplitModel, SplitModel]


@pytest.fixture(scope="module")
def parts(make: Callable[..., Any]) -> Parts:
    made = make("minimax_m2")
    return ModelFactory.create_split_models(
        "minimax_m2", str(made.folder), 1, 3, experts_implementation="eager"
    )


@pytest.fixture
def saved(parts: Parts, tmp_path: Path) -> Path:
    """A trunk's folder."""
    folder = tmp_path / "trunk"
    parts[1].save(folder)
    return folder


@pytest.mark.parametrize("role", [0, 1, 2])
def test_loaded_component_is_the_saved_one_bit_for_bit(parts: Parts, role: int, tmp_path: Path) -> None:
    parts[role].save(tmp_path / "one")
    loaded = SplitModel.load(tmp_path / "one")
    ours, theirs = parts[role].model.state_dict(), loaded.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )
    assert repr(loaded) == repr(parts[role])


def test_implementations_are_remembered(saved: Path) -> None:
    assert SplitModel.load(saved).model.config._experts_implementation == "eager"


def test_folder_holds_safetensors_and_json_only(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == [
        "component.json",
        "config.json",
        "model.safetensors",
    ]
    assert [path.name for path in saved.parent.iterdir()] == ["trunk"]
    description = json.loads((saved / "component.json").read_text())
    assert (description["component"], description["start_layer"], description["end_layer"]) == ("trunk", 1, 3)
    assert load_file(saved / "model.safetensors").keys() == description["tensors"].keys()


def test_saving_again_replaces_the_component(parts: Parts, saved: Path) -> None:
    parts[0].save(saved)
    assert str(SplitModel.load(saved).part).startswith("bottom")
    assert [path.name for path in saved.parent.iterdir()] == ["trunk"]


def test_what_a_killed_run_left_is_no_hindrance(parts: Parts, saved: Path) -> None:
    for name in (".trunk.tmp", ".former"):
        half = saved.with_name(".trunk.0123abcd.tmp") / name
        half.mkdir(parents=True)
        (half / "half").touch()
    parts[1].save(saved)
    assert [path.name for path in saved.parent.iterdir()] == ["trunk"]


def test_trained_component_is_saved_as_it_is(parts: Parts, tmp_path: Path) -> None:
    parts[0].save(tmp_path / "first")
    model = SplitModel.load(tmp_path / "first")
    weight = model.model.get_input_embeddings().weight
    with torch.no_grad():
        weight += 1
    model.save(tmp_path / "second")
    assert torch.equal(SplitModel.load(tmp_path / "second").model.get_input_embeddings().weight, weight)


def test_component_that_was_cast_keeps_its_dtype(parts: Parts, tmp_path: Path) -> None:
    parts[1].save(tmp_path / "first")
    SplitModel.load(tmp_path / "first").to(torch.float32).save(tmp_path / "second")
    loaded = SplitModel.load(tmp_path / "second")
    assert {tensor.dtype for tensor in loaded.model.state_dict().values()} == {torch.float32}
    assert loaded.dtype == torch.float32


def test_something_else_is_not_overwritten(parts: Parts, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("dear")
    with pytest.raises(UsageError, match="home holds something else"):
        parts[1].save(tmp_path / "home")
    (tmp_path / "file").write_text("dear")
    with pytest.raises(UsageError, match="file holds something else"):
        parts[1].save(tmp_path / "file")


def test_place_that_cannot_be_written_is_named(parts: Parts, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot save trunk"):
        parts[1].save(tmp_path / "file" / "trunk")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "component.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


NORM = "model.layers.1.input_layernorm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no description": (lambda folder: (folder / "component.json").unlink(), "holds no component"),
    "description cut": (lambda folder: (folder / "component.json").write_text("{"), "holds no component"),
    "another format": (lambda folder: edit(folder, format="zip"), "does not describe a component"),
    "another version": (
        lambda folder: edit(folder, version=9),
        "does not describe a component: expected .* of version 1",
    ),
    "unknown component": (lambda folder: edit(folder, component="middle"), "component.json is damaged"),
    "layers of another": (lambda folder: edit(folder, start_layer=0), "component.json is damaged"),
    "layers past the last": (lambda folder: edit(folder, end_layer=9), "component.json is damaged"),
    "no object": (
        lambda folder: (folder / "component.json").write_text("[1]"),
        "component.json does not describe a component",
    ),
    "layer as a fraction": (lambda folder: edit(folder, end_layer=3.0), "component.json is damaged"),
    "layer without end": (lambda folder: edit(folder, end_layer=float("inf")), "component.json"),
    "layer as text": (lambda folder: edit(folder, start_layer="1"), "component.json is damaged"),
    "an implementation of another kind": (
        lambda folder: edit(folder, attn_implementation=1.5),
        "component.json is damaged",
    ),
    "tensors of another kind": (lambda folder: edit(folder, tensors=[1]), "component.json is damaged"),
    "a checksum of another kind": (
        lambda folder: edit(folder, tensors={NORM: True}),
        "component.json is damaged",
    ),
    "no dtype": (lambda folder: edit(folder, dtype="nn"), "component.json is damaged"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json.* cannot be used"),
    "no tensors": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "tensor missing": (lambda folder: rewrite(folder, lambda found: found.pop(NORM)), "found nothing"),
    "tensor too many": (
        lambda folder: rewrite(folder, lambda found: found.update(more=torch.ones(1))),
        "more: no checksum",
    ),
    "another shape": (
        lambda folder: rewrite(folder, lambda found: found.update({NORM: torch.ones(3)})),
        "input_layernorm.weight in .* is damaged",
    ),
    "no checksum": (lambda folder: edit(folder, tensors={}), "no checksum"),
    "another value": (
        lambda folder: rewrite(folder, lambda found: found[NORM].add_(1)),
        "input_layernorm.weight in .* is damaged: expected crc32",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folder_is_refused(saved: Path, damage: str) -> None:
    cause, message = DAMAGES[damage]
    cause(saved)
    with pytest.raises(CheckpointError, match=message):
        SplitModel.load(saved)


def test_every_flipped_byte_is_noticed(saved: Path) -> None:
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    for position in range(0, len(whole), len(whole) // 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CheckpointError):
            SplitModel.load(saved)


def test_truncated_file_is_named(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="model.safetensors.*truncated"):
        SplitModel.load(saved)


def test_file_is_one_that_safetensors_reads_and_checksums_are_those_of_its_bytes(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.arange(12, dtype=torch.bfloat16).view(3, 4).T,
        "codes": torch.arange(16).to(torch.float8_e4m3fn),
        "nothing": torch.empty(0, 4),
        "large": torch.tensor([2**60]),
    }
    checksums = write_tensors(tmp_path / "model.safetensors", tensors)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(-1).view(torch.uint8), raw)
        assert checksums[name] == zlib.crc32(raw.numpy().tobytes())


def test_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wave is torch.complex64"):
        write_tensors(tmp_path / "model.safetensors", {"wave": torch.zeros(1, dtype=torch.complex64)})
