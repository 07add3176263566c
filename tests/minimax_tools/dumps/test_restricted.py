from __future__ import annotations

import codecs
import collections
import io
import os
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minimax_tools.dumps.tensor_file import list_tensors, load_restricted, read_tensor
from minimax_tools.errors import CaptureError
from minimax_tools.torch_files.inert import InertRecord

LAYOUTS = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "stream"])

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
]


class Config:
    """A class that a file names and that must not be made."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a class of the file was used")


class Call:
    """Pickles to a call of `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


def save(value: Any, path: Path, *, is_zip: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=is_zip)
    return path


def reload(value: Any, directory: Path, *, is_zip: bool = True) -> Any:
    return load_restricted(save(value, directory / "saved.pt", is_zip=is_zip))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def rewrite(
    path: Path, change: Callable[[str, bytes], bytes], *, compression: int = zipfile.ZIP_STORED
) -> Path:
    """The archive at `path` with every record changed, its checksums right again."""
    changed = path.with_name("changed.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(changed, "w", compression) as target:
        for record in source.infolist():
            target.writestr(record.filename, change(record.filename, source.read(record)))
    return changed


@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_any_dtype_keeps_its_bits(dtype: torch.dtype, is_zip: bool, tmp_path: Path) -> None:
    content = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = content.view(dtype).reshape(2, 3)
    loaded = reload({"tensor": tensor}, tmp_path, is_zip=is_zip)["tensor"]
    assert (loaded.dtype, loaded.shape) == (dtype, (2, 3))
    assert bits(loaded) == bits(tensor)


@LAYOUTS
def test_views_keep_offset_strides_and_shared_storage(is_zip: bool, tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value = {"base": base, "part": base[1:3, 2:], "turned": base.t(), "wide": base[:1].expand(3, 6)}
    loaded = reload(value, tmp_path, is_zip=is_zip)
    for name, tensor in value.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].stride() == tensor.stride()
    loaded["base"][1, 2] = -1
    assert loaded["part"][0, 0] == -1


@LAYOUTS
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1, 1)])
def test_tensor_of_unusual_shape_is_read(shape: tuple[int, ...], is_zip: bool, tmp_path: Path) -> None:
    tensor = torch.ones(shape)
    assert torch.equal(reload(tensor, tmp_path, is_zip=is_zip), tensor)


@LAYOUTS
def test_lazy_conjugation_and_negation_are_kept(is_zip: bool, tmp_path: Path) -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    loaded = reload([tensor.conj(), tensor.clone().conj().imag], tmp_path, is_zip=is_zip)
    assert torch.equal(loaded[0], tensor.conj())
    assert torch.equal(loaded[1], -tensor.imag)


@LAYOUTS
def test_parameter_comes_as_plain_tensor(is_zip: bool, tmp_path: Path) -> None:
    loaded = reload(torch.nn.Parameter(torch.ones(2)), tmp_path, is_zip=is_zip)
    assert type(loaded) is torch.Tensor
    assert not loaded.requires_grad


@LAYOUTS
def test_tensor_of_an_xla_device_is_read(is_zip: bool, tmp_path: Path) -> None:
    tensor = torch.randn(2, 3).bfloat16()
    args = (tensor.dtype, "xla:0", False)
    now = Call(torch._utils._rebuild_device_tensor_from_cpu_tensor, tensor, *args)
    before = Call(torch._utils._rebuild_device_tensor_from_numpy, tensor.float().numpy(), *args)
    for loaded in reload([now, before], tmp_path, is_zip=is_zip):
        assert torch.equal(loaded, tensor)


def test_tensor_of_an_xla_device_is_listed(tmp_path: Path) -> None:
    args = (torch.bfloat16, "xla:0", False)
    before = Call(torch._utils._rebuild_device_tensor_from_numpy, np.ones((2, 3), np.float32), *args)
    (held,) = list_tensors(save({"a": before}, tmp_path / "saved.pt", is_zip=True))
    assert (held.keys, held.shape, held.dtype) == (("a",), (2, 3), "bfloat16")
    assert torch.equal(read_tensor(tmp_path / "saved.pt", held.keys), torch.ones(2, 3).bfloat16())


@LAYOUTS
def test_numbers_and_containers_are_read(is_zip: bool, tmp_path: Path) -> None:
    value = {
        "ordered": collections.OrderedDict(a=1),
        "counter": collections.Counter("aab"),
        "default": collections.defaultdict(list, {1: [2]}),
        "sets": ({1, 2}, frozenset({3})),
        "size": torch.Size((2, 3)),
        "dtype": torch.bfloat16,
        "complex": 1 + 2j,
        "bytes": (b"\xff\x00", bytearray(b"ab")),
        "numpy": (np.float32(1.5), np.int64(2), np.bool_(True)),
    }
    assert reload(value, tmp_path, is_zip=is_zip) == value


def test_numpy_arrays_of_numbers_are_read(tmp_path: Path) -> None:
    arrays = [np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.arange(3, dtype=">i4")]
    for loaded, array in zip(reload(arrays, tmp_path), arrays, strict=True):
        assert np.array_equal(loaded, array)


def test_numpy_array_of_objects_stays_inert(tmp_path: Path) -> None:
    loaded = reload(np.array([Config(1)], dtype=object), tmp_path)
    assert isinstance(loaded, InertRecord)


@LAYOUTS
def test_class_of_the_file_is_a_record_and_the_rest_is_read(is_zip: bool, tmp_path: Path) -> None:
    loaded = reload({"config": Config(3072), "output": torch.ones(2)}, tmp_path, is_zip=is_zip)
    record = loaded["config"]
    assert isinstance(record, InertRecord)
    assert record.name == "Config"
    assert record.state == {"hidden_size": 3072}
    assert torch.equal(loaded["output"], torch.ones(2))


@LAYOUTS
@pytest.mark.parametrize(
    "function",
    [os.mkdir, torch.load, torch.hub.load, torch.device, torch.serialization._get_layout],
    ids=lambda function: f"{function.__module__}.{function.__name__}",
)
def test_functions_in_a_file_are_not_called(
    function: Callable[..., Any], is_zip: bool, tmp_path: Path
) -> None:
    victim = tmp_path / "made"
    loaded = reload([Call(function, str(victim)), torch.ones(2)], tmp_path, is_zip=is_zip)
    assert isinstance(loaded[0], InertRecord)
    assert loaded[0].args == (str(victim),)
    assert torch.equal(loaded[1], torch.ones(2))
    assert not victim.exists()


def test_function_behind_a_rebuild_is_not_called(tmp_path: Path) -> None:
    victim = tmp_path / "made"
    hidden = Call(torch._tensor._rebuild_from_type_v2, os.mkdir, torch.Tensor, (str(victim),), None)
    saved = save([hidden], tmp_path / "saved.pt")
    with pytest.raises(AttributeError):
        torch.load(saved, weights_only=False)
    assert victim.is_dir(), "the attack itself must be live"
    victim.rmdir()

    assert isinstance(load_restricted(saved)[0], InertRecord)
    assert not victim.exists()


def test_codec_of_the_file_is_not_used(tmp_path: Path) -> None:
    loaded = reload(Call(codecs.encode, "text", "rot13"), tmp_path)
    assert isinstance(loaded, InertRecord)


def test_sparse_tensor_stays_inert(tmp_path: Path) -> None:
    assert isinstance(reload(torch.eye(2).to_sparse(), tmp_path), InertRecord)


def test_path_in_a_file_stays_inert(tmp_path: Path) -> None:
    assert isinstance(reload(pathlib.PurePosixPath("a/b"), tmp_path), InertRecord)


@pytest.mark.parametrize(
    "persistent_id",
    [("storage", "text", "0", "cpu", 1), ("module", os.mkdir, "file", "source"), ("storage",), 7, "x", None],
)
def test_odd_persistent_id_is_a_record(persistent_id: Any, tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return persistent_id if obj == "outside" else None

    buffer = io.BytesIO()
    if persistent_id is None:
        pickle.dump("outside", buffer)
    else:
        Pickler(buffer, protocol=2).dump(["outside"])
    path = save(torch.ones(1), tmp_path / "saved.pt")
    changed = rewrite(path, lambda name, old: buffer.getvalue() if name.endswith("data.pkl") else old)
    loaded = load_restricted(changed)
    if persistent_id is None:
        assert loaded == "outside"
    else:
        assert isinstance(loaded[0], InertRecord)


def test_file_saved_without_checksums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save(torch.ones(3), tmp_path / "saved.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(load_restricted(path), torch.ones(3))


def test_flipped_bit_in_a_tensor_is_found(tmp_path: Path) -> None:
    path = save(torch.full((64,), 7.0), tmp_path / "saved.pt")
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<f", 7.0)) + 9] ^= 1
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=r"saved\.pt is damaged.*checksum.*[Cc]opy it again"):
        load_restricted(path)


@LAYOUTS
def test_file_cut_anywhere_is_refused(is_zip: bool, tmp_path: Path) -> None:
    path = save({"a": torch.ones(8), "b": Config(1)}, tmp_path / "saved.pt", is_zip=is_zip)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(CaptureError):
            load_restricted(path)


@LAYOUTS
def test_every_changed_byte_is_read_or_refused(is_zip: bool, tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save(
            {"a": torch.ones(4), "b": Config(1), "c": {1: (2, 3)}}, tmp_path / "saved.pt", is_zip=is_zip
        )
    finally:
        torch.serialization.set_crc32_options(before)
    content = path.read_bytes()
    refused = 0
    for position in range(len(content)):
        for value in (0, 0x52, 0xFF):  # 0x52 is REDUCE
            path.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
            try:
                load_restricted(path)
            except CaptureError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", pickle.dumps({"a": 1}), b"\x00" * 1000])
def test_file_that_is_not_torchs_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=r"other\.pt is damaged, or torch\.save did not write it"):
        load_restricted(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"cannot read .*gone\.pt: found No such file.*Check the path"):
        load_restricted(tmp_path / "gone.pt")


def test_compressed_archive_is_refused(tmp_path: Path) -> None:
    path = save(torch.zeros(1000), tmp_path / "saved.pt")
    changed = rewrite(path, lambda _, old: old, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CaptureError, match="compressed"):
        load_restricted(changed)


def test_big_endian_archive_is_refused(tmp_path: Path) -> None:
    path = save(torch.zeros(4), tmp_path / "saved.pt")
    changed = rewrite(path, lambda name, old: b"big" if name.endswith("byteorder") else old)
    with pytest.raises(CaptureError, match="little-endian"):
        load_restricted(changed)


def test_storage_shorter_than_the_pickle_says_is_refused(tmp_path: Path) -> None:
    path = save(torch.ones(8), tmp_path / "saved.pt")
    changed = rewrite(path, lambda name, old: old[:-4] if name.endswith("data/0") else old)
    with pytest.raises(CaptureError, match="storage 0 has 28 bytes, the pickle says 32"):
        load_restricted(changed)


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (9,), (1,)), (1, (8,), (1,)), (0, (2,), (8,)), (-1, (2,), (1,)), (0, (-1,), (1,))],
)
def test_tensor_that_reaches_outside_its_storage_is_refused(
    offset: int, size: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path
) -> None:
    class Outside:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            storage = torch.ones(8).untyped_storage()
            typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
            return torch._utils._rebuild_tensor_v2, (
                typed,
                offset,
                size,
                stride,
                False,
                collections.OrderedDict(),
            )

    path = save(Outside(), tmp_path / "saved.pt")
    with pytest.raises(CaptureError, match="_rebuild_tensor_v2"):
        load_restricted(path)


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    path = save({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "saved.pt")
    content = path.read_bytes()
    directory = content.index(b"PK\x01\x02")
    entry = content[directory : content.index(b"PK\x01\x02", directory + 4)]
    # Every record of the directory is said to be as large as the archive.
    changed = bytearray(content)
    position = directory
    while position >= 0:
        changed[position + 20 : position + 28] = struct.pack("<II", len(content), len(content))
        position = content.find(entry[:4], position + 4)
    path.write_bytes(changed)
    with pytest.raises(CaptureError, match="larger than the archive"):
        load_restricted(path)
