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
    folder = str(made.folder)
    return ModelFactory.create_split_models("minimax_m2", folder, 1, 3, experts_implementation="eager")


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
    assert loaded.model.config._experts_implementation == "eager"


def test_folder_holds_safetensors_and_json_only(saved: Path) -> None:
    names = sorted(path.name for path in saved.iterdir())
    assert names == ["component.json", "config.json", "model.safetensors"]
    assert [path.name for path in saved.parent.iterdir()] == ["trunk"]
    description = json.loads((saved / "component.json").read_text())
    assert (description["component"], description["start_layer"], description["end_layer"]) == ("trunk", 1, 3)
    assert load_file(saved / "model.safetensors").keys() == description["tensors"].keys()


def test_saving_again_replaces_the_component_and_what_a_killed_run_left(parts: Parts, saved: Path) -> None:
    for name in (".trunk.tmp", ".former"):
        half = saved.with_name(".trunk.0123abcd.tmp") / name
        half.mkdir(parents=True)
        (half / "half").touch()
    parts[0].save(saved)
    assert str(SplitModel.load(saved).part).startswith("bottom")
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


def test_place_that_holds_something_else_or_cannot_be_written_is_named(parts: Parts, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("dear")
    (tmp_path / "file").write_text("dear")
    for name in ("home", "file"):
        with pytest.raises(UsageError, match=f"{name} holds something else"):
            parts[1].save(tmp_path / name)
    with pytest.raises(CheckpointError, match="cannot save trunk"):
        parts[1].save(tmp_path / "file" / "trunk")


def describing(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "component.json").write_text(text)


def noting(**changes: Any) -> Callable[[Path], Any]:
    """Changes what component.json says."""

    def edit(folder: Path) -> None:
        path = folder / "component.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def storing(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    """Changes the tensors."""

    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


NORM = "model.layers.1.input_layernorm.weight"
NO_DESCRIPTION = "does not describe a component"
DAMAGED = "component.json is damaged"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no description": (lambda folder: (folder / "component.json").unlink(), "holds no component"),
    "description cut": (describing("{"), "holds no component"),
    "no object": (describing("[1]"), NO_DESCRIPTION),
    "another format": (noting(format="zip"), NO_DESCRIPTION),
    "another version": (noting(version=9), f"{NO_DESCRIPTION}: expected .* of version 1"),
    "unknown component": (noting(component="middle"), DAMAGED),
    "layers of another": (noting(start_layer=0), DAMAGED),
    "layers past the last": (noting(end_layer=9), DAMAGED),
    "layer as a fraction": (noting(end_layer=3.0), DAMAGED),
    "layer without end": (noting(end_layer=float("inf")), "component.json"),
    "layer as text": (noting(start_layer="1"), DAMAGED),
    "an implementation of another kind": (noting(attn_implementation=1.5), DAMAGED),
    "tensors of another kind": (noting(tensors=[1]), DAMAGED),
    "a checksum of another kind": (noting(tensors={NORM: True}), DAMAGED),
    "no dtype": (noting(dtype="nn"), DAMAGED),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json.* cannot be used"),
    "no tensors": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "tensor missing": (storing(lambda found: found.pop(NORM)), "found nothing"),
    "tensor too many": (storing(lambda found: found.update(more=torch.ones(1))), "more: no checksum"),
    "another shape": (storing(lambda found: found.update({NORM: torch.ones(3)})), f"{NORM} in .* is damaged"),
    "no checksum": (noting(tensors={}), "no checksum"),
    "another value": (storing(lambda found: found[NORM].add_(1)), f"{NORM} in .* is damaged: expected crc32"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folder_is_refused(saved: Path, damage: str) -> None:
    cause, message = DAMAGES[damage]
    cause(saved)
    with pytest.raises(CheckpointError, match=message):
        SplitModel.load(saved)


def test_every_flipped_byte_and_a_truncated_file_are_noticed(saved: Path) -> None:
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    for position in range(0, len(whole), len(whole) // 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CheckpointError):
            SplitModel.load(saved)
    path.write_bytes(whole[:-4])
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
