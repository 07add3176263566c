from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError
from minimax_tools.model.weight_names import EMBEDDING

Tensors = dict[str, torch.Tensor]
Writer = Callable[..., Path]

INDEX = "model.safetensors.index.json"
FIRST = "model-00000-of-00002.safetensors"
SECOND = "model-00001-of-00002.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def _fault(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        TensorIndex.from_folder(folder)
    return str(caught.value)


def _edit_weight_map(folder: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def _write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_entries_say_where_the_bytes_are(fp8_tensors: Tensors, write: Writer) -> None:
    index = TensorIndex.from_folder(write(fp8_tensors))
    assert set(index.names) == set(fp8_tensors)
    for name, tensor in fp8_tensors.items():
        entry = index[name]
        assert (entry.name, entry.dtype.as_torch(), entry.shape) == (name, tensor.dtype, tuple(tensor.shape))
        data = entry.file.read_bytes()[entry.offset : entry.offset + entry.size_bytes]
        assert data == bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def test_headers_suffice_and_files_that_an_index_does_not_name_are_left_alone(
    fp8_tensors: Tensors, write: Writer
) -> None:
    index = TensorIndex.from_folder(write(fp8_tensors, "without", index=False))
    assert set(index.names) == set(fp8_tensors)
    assert [file.name for file in index.files] == [FIRST, SECOND]
    folder = write(fp8_tensors)
    save_file({"mtp.weight": torch.ones(1)}, folder / "mtp.safetensors")
    assert "mtp.weight" not in TensorIndex.from_folder(folder)


@pytest.mark.parametrize("metadata", [{}, {"__metadata__": None}, {"__metadata__": {"format": "pt"}}])
def test_metadata_may_be_null_or_absent(metadata: dict[str, object], tmp_path: Path) -> None:
    header = {**metadata, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    _write_header(tmp_path / "model.safetensors", header, bytes(8))
    assert TensorIndex.from_folder(tmp_path).names == ("a",)


def test_layer_names_are_of_that_layer_only(tmp_path: Path) -> None:
    names = [f"model.layers.{name}" for name in ("1.a", "1.b", "10.a", "2.a")]
    save_file({name: torch.ones(1) for name in (*names, "lm_head.weight")}, tmp_path / "model.safetensors")
    index = TensorIndex.from_folder(tmp_path)
    assert index.layer_names(1) == ("model.layers.1.a", "model.layers.1.b")
    assert index.layer_names(10) == ("model.layers.10.a",)
    assert index.layer_names(3) == ()
    assert index.layers == (1, 2, 10)


def test_a_tensor_that_is_not_there_is_named(fp8_tensors: Tensors, write: Writer) -> None:
    folder = write(fp8_tensors)
    fault = rf"{folder} holds no tensor 'model.layers.7.x'.*2 decoder layers"
    with pytest.raises(CheckpointError, match=fault) as caught:
        TensorIndex.from_folder(folder)["model.layers.7.x"]
    assert caught.value.next_step


@pytest.mark.parametrize("layer", [0, 1, None])
def test_digest_is_the_same_for_an_fp8_and_a_bf16_copy(
    layer: int | None, fp8_tensors: Tensors, bf16_tensors: Tensors, write: Writer
) -> None:
    fp8 = TensorIndex.from_folder(write(fp8_tensors, "fp8"))
    bf16 = TensorIndex.from_folder(write(bf16_tensors, "bf16", index=False))
    assert len(fp8) > len(bf16)
    assert fp8.digest(layer) == bf16.digest(layer) is not None


@pytest.mark.parametrize(
    ("name", "changed"), [(Q_PROJ, [1]), ("model.layers.0.self_attn.q_proj.weight", [0]), (EMBEDDING, [None])]
)
@pytest.mark.parametrize("change", ["name", "shape"])
def test_digest_changes_with_a_name_or_a_shape_of_its_part_only(
    change: str, name: str, changed: list[int | None], bf16_tensors: Tensors, write: Writer
) -> None:
    before = TensorIndex.from_folder(write(bf16_tensors, "before"))
    tensor = bf16_tensors.pop(name)
    bf16_tensors[f"{name}s" if change == "name" else name] = tensor if change == "name" else tensor.T
    after = TensorIndex.from_folder(write(bf16_tensors, "after"))
    parts = (0, 1, None)
    assert [part for part in parts if before.digest(part) != after.digest(part)] == changed


# A folder that lacks some shards: layer 0 in one, layer 1 in another, one tensor of layer 1 beside layer 0.


@pytest.fixture
def part(fp8_tensors: Tensors, tmp_path: Path) -> Path:
    folder = tmp_path / "part"
    folder.mkdir()
    weight_map = {
        name: "layer_1.safetensors" if name.startswith("model.layers.1.") else "rest.safetensors"
        for name in fp8_tensors
    }
    weight_map["model.layers.1.input_layernorm.weight"] = "rest.safetensors"
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    rest = {name: fp8_tensors[name] for name, file in weight_map.items() if file == "rest.safetensors"}
    save_file({name: tensor.contiguous() for name, tensor in rest.items()}, folder / "rest.safetensors")
    return folder


def test_a_folder_with_the_shards_of_some_layers_is_read_when_those_are_named(part: Path) -> None:
    index = TensorIndex.from_folder(part, layers=range(1))
    assert "model.layers.0.self_attn.q_proj.weight" in index
    assert EMBEDDING in index
    assert Q_PROJ not in index
    assert index.absent[Q_PROJ] == "layer_1.safetensors"
    assert {file.name for file in index.files} == {"rest.safetensors"}
    with pytest.raises(CheckpointError, match=r"its shard layer_1\.safetensors is not in .*Fetch that shard"):
        index[Q_PROJ]


def test_without_naming_layers_a_missing_shard_is_a_fault(part: Path) -> None:
    assert "has 1 fault: found shard layer_1.safetensors is missing. Fetch" in _fault(part)


@pytest.mark.parametrize("layers", [range(1, 2), range(2)])
def test_a_missing_shard_of_a_named_layer_is_a_fault(layers: range, part: Path) -> None:
    fault = r"shard layer_1\.safetensors is missing, which holds tensors of layer 1\."
    with pytest.raises(CheckpointError, match=fault):
        TensorIndex.from_folder(part, layers=layers)


def test_the_shards_that_are_there_are_checked_all_the_same(part: Path) -> None:
    _edit_weight_map(part, lambda weight_map: weight_map.update(ghost="rest.safetensors"))
    with pytest.raises(CheckpointError, match=r"places ghost in rest\.safetensors, whose header lacks it"):
        TensorIndex.from_folder(part, layers=range(1))


def test_a_folder_without_the_tensors_outside_layers_is_read_when_layers_are_named(part: Path) -> None:
    _edit_weight_map(part, lambda weight_map: weight_map.update({EMBEDDING: "embedding.safetensors"}))
    kept = load_file(part / "rest.safetensors")
    del kept[EMBEDDING]
    save_file(kept, part / "rest.safetensors")
    index = TensorIndex.from_folder(part, layers=range(1))
    assert index.digest(None) is None
    with pytest.raises(CheckpointError, match=r"its shard embedding\.safetensors is not in"):
        index[EMBEDDING]


def test_a_layer_of_which_a_part_is_there_has_no_digest(
    fp8_tensors: Tensors, part: Path, write: Writer
) -> None:
    whole = TensorIndex.from_folder(write(fp8_tensors))
    index = TensorIndex.from_folder(part, layers=range(1))
    assert index.layers == (0, 1)
    assert index.digest(1) is None
    assert [index.digest(0), index.digest(None)] == [whole.digest(0), whole.digest(None)]


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    assert "expected safetensors shards, found none" in _fault(tmp_path)
    assert "no such folder" in _fault(tmp_path / "nothing")


def test_a_truncated_shard_is_named(fp8_tensors: Tensors, write: Writer) -> None:
    folder = write(fp8_tensors)
    data = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(data[:-1])
    message = _fault(folder)
    assert f"/{FIRST} is damaged ({len(data) - 1} bytes of {len(data)}: the data is truncated)" in message


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "0 bytes, too short for a header"),
        (struct.pack("<Q", 1 << 60) + b"{}", "in a file of 10"),
        (struct.pack("<Q", 4) + b"{no}", "a header that is not JSON"),
        (struct.pack("<Q", 3) + b"\xff\xfe{", "a header that is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "a header that is no JSON object"),
    ],
)
def test_a_damaged_header_is_named(content: bytes, found: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert found in _fault(tmp_path)


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({"dtype": "F32", "shape": [2]}, "no dtype, shape and data_offsets for a"),
        (7, "no dtype, shape and data_offsets for a"),
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}, "dtype F4 for a"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "offsets 0 to 8 for a, which is F32 [3]"),
        ({"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}, "offsets 0 to 8 for a"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "offsets -8 to 0 for a"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "where byte"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "4 bytes after the last tensor"),
    ],
)
def test_an_entry_that_does_not_add_up_is_named(entry: object, found: str, tmp_path: Path) -> None:
    _write_header(tmp_path / "model.safetensors", {"a": entry}, bytes(8))
    assert found in _fault(tmp_path)


def test_tensors_that_overlap_are_a_fault(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    _write_header(tmp_path / "model.safetensors", {"a": entry, "b": entry}, bytes(8))
    assert "b at byte" in _fault(tmp_path)


def test_a_tensor_in_two_files_is_a_fault(fp8_tensors: Tensors, write: Writer) -> None:
    folder = write(fp8_tensors, index=False)
    save_file({Q_PROJ: fp8_tensors[Q_PROJ]}, folder / "model.safetensors")
    message = _fault(folder)
    assert f"{Q_PROJ} is both in" in message
    assert "and in model.safetensors" in message


def test_an_index_that_names_the_wrong_file_or_lacks_a_tensor_is_a_fault(
    fp8_tensors: Tensors, write: Writer
) -> None:
    folder = write(fp8_tensors)
    right = json.loads((folder / INDEX).read_text())["weight_map"][Q_PROJ]
    wrong = SECOND if right == FIRST else FIRST
    _edit_weight_map(folder, lambda weight_map: weight_map.update({Q_PROJ: wrong}))
    message = _fault(folder)
    assert f"the index places {Q_PROJ} in {wrong}, whose header lacks it" in message
    assert f"{right} holds {Q_PROJ}, the index places it in {wrong}" in message
    _edit_weight_map(folder, lambda weight_map: weight_map.pop(Q_PROJ))
    assert f"{right} holds {Q_PROJ}, the index lacks it" in _fault(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": null}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_no_index_is_refused(text: str, fp8_tensors: Tensors, write: Writer) -> None:
    folder = write(fp8_tensors)
    (folder / INDEX).write_text(text)
    assert INDEX in _fault(folder)


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "/etc/passwd", ".."])
def test_an_index_that_leads_out_of_the_folder_is_refused(
    shard: str, fp8_tensors: Tensors, write: Writer
) -> None:
    folder = write(fp8_tensors)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    assert "names files that do not lie beside it" in _fault(folder)


def test_all_faults_are_listed_at_once_and_many_counted(fp8_tensors: Tensors, write: Writer) -> None:
    folder = write(fp8_tensors)
    _edit_weight_map(folder, lambda weight_map: weight_map.update({f"ghost{i}": FIRST for i in range(40)}))
    message = _fault(folder)
    assert "has 40 faults" in message
    assert "and 28 more" in message
    (folder / FIRST).write_bytes(b"short")
    (folder / SECOND).unlink()
    message = _fault(folder)
    assert f"has 2 faults: found {folder / FIRST} is damaged (5 bytes" in message
    assert f"shard {SECOND} is missing" in message
