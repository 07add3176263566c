from __future__ import annotations

import collections
import io
import os
import pathlib
import pickle
import shutil
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
from minimax_tools.torch_file import InertRecord

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


def save(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def reload(value: Any, directory: Path) -> Any:
    return load_restricted(save(value, directory / "saved.pt"))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_any_dtype_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    content = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = content.view(dtype).reshape(2, 3)
    loaded = reload({"tensor": tensor}, tmp_path)["tensor"]
    assert (loaded.dtype, loaded.shape) == (dtype, (2, 3))
    assert bits(loaded) == bits(tensor)


def test_views_keep_offset_strides_and_shared_storage(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value = {"base": base, "part": base[1:3, 2:], "turned": base.t(), "wide": base[:1].expand(3, 6)}
    loaded = reload(value, tmp_path)
    for name, tensor in value.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].stride() == tensor.stride()
    loaded["base"][1, 2] = -1
    assert loaded["part"][0, 0] == -1


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1, 1)])
def test_tensor_of_unusual_shape_is_read(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.ones(shape)
    assert torch.equal(reload(tensor, tmp_path), tensor)


def test_lazy_conjugation_and_negation_are_kept(tmp_path: Path) -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    loaded = reload([tensor.conj(), tensor.clone().conj().imag], tmp_path)
    assert torch.equal(loaded[0], tensor.conj())
    assert torch.equal(loaded[1], -tensor.imag)


def test_parameter_comes_as_plain_tensor(tmp_path: Path) -> None:
    loaded = read_tensor(save(torch.nn.Parameter(torch.ones(2)), tmp_path / "saved.pt"), ())
    assert type(loaded) is torch.Tensor
    assert not loaded.requires_grad


def test_tensor_of_an_xla_device_is_read(tmp_path: Path) -> None:
    tensor = torch.randn(2, 3).bfloat16()
    args = (tensor.dtype, "xla:0", False)
    now = Call(torch._utils._rebuild_device_tensor_from_cpu_tensor, tensor, *args)
    # Of this many that are no records of the file, some lie where one would.
    before = [
        Call(torch._utils._rebuild_device_tensor_from_numpy, tensor.float().numpy(), *args)
        for _ in range(300)
    ]
    for loaded in reload([now, *before], tmp_path):
        assert torch.equal(loaded, tensor)


def test_tensor_of_an_xla_device_is_listed(tmp_path: Path) -> None:
    args = (torch.bfloat16, "xla:0", False)
    before = Call(torch._utils._rebuild_device_tensor_from_numpy, np.ones((2, 3), np.float32), *args)
    (held,) = list_tensors(save({"a": before}, tmp_path / "saved.pt"))
    assert (held.keys, held.shape, held.dtype) == (("a",), (2, 3), "bfloat16")
    assert torch.equal(read_tensor(tmp_path / "saved.pt", held.keys), torch.ones(2, 3).bfloat16())


def test_numbers_and_containers_are_read(tmp_path: Path) -> None:
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
    assert reload(value, tmp_path) == value


def test_numpy_arrays_of_numbers_are_read(tmp_path: Path) -> None:
    arrays = [np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.arange(3, dtype=">i4")]
    for loaded, array in zip(reload(arrays, tmp_path), arrays, strict=True):
        assert np.array_equal(loaded, array)


def test_numpy_array_of_objects_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="a numpy array that is not of numbers"):
        reload(np.array([Config(1)], dtype=object), tmp_path)


def test_class_of_the_file_is_a_record_and_the_rest_is_read(tmp_path: Path) -> None:
    loaded = reload({"config": Config(3072), "output": torch.ones(2)}, tmp_path)
    record = loaded["config"]
    assert isinstance(record, InertRecord)
    assert record.kind.endswith(".Config")
    assert record.state == {"hidden_size": 3072}
    assert torch.equal(loaded["output"], torch.ones(2))


@pytest.mark.parametrize(
    "function",
    [shutil.rmtree, torch.load, torch.hub.load],
    ids=lambda function: f"{function.__module__}.{function.__name__}",
)
def test_functions_in_a_file_are_not_called(function: Callable[..., Any], tmp_path: Path) -> None:
    victim = tmp_path / "kept"
    victim.mkdir()
    loaded = reload([Call(function, str(victim)), torch.ones(2)], tmp_path)
    assert isinstance(loaded[0], InertRecord)
    assert loaded[0].args == (str(victim),)
    assert torch.equal(loaded[1], torch.ones(2))
    assert victim.is_dir()


def test_function_behind_a_rebuild_is_not_called(tmp_path: Path) -> None:
    victim = tmp_path / "made"
    hidden = Call(torch._tensor._rebuild_from_type_v2, shutil.rmtree, torch.Tensor, (str(victim),), None)
    saved = save([hidden], tmp_path / "saved.pt")
    victim.mkdir()
    with pytest.raises(AttributeError):
        torch.load(saved, weights_only=False)
    assert not victim.exists(), "the attack itself must be live"
    victim.mkdir()

    with pytest.raises(CaptureError, match=r"saved\.pt is damaged"):
        load_restricted(saved)
    assert victim.is_dir()


def test_tensor_without_elements_in_memory_is_not_listed(tmp_path: Path) -> None:
    value = {"sparse": torch.eye(2).to_sparse(), "meta": torch.ones(2, device="meta"), "fine": torch.ones(2)}
    path = save(value, tmp_path / "saved.pt")
    assert [held.keys for held in list_tensors(path)] == [("fine",)]
    for name in ("sparse", "meta"):
        with pytest.raises(CaptureError, match=f"holds no tensor at {name}"):
            read_tensor(path, (name,))


def test_path_in_a_file_stays_inert(tmp_path: Path) -> None:
    assert isinstance(reload(pathlib.PurePosixPath("a/b"), tmp_path), InertRecord)


@pytest.mark.parametrize(
    "persistent_id",
    [("storage", "text", "0", "cpu", 1), ("module", os.mkdir, "file", "source"), ("storage",), 7, "x"],
)
def test_odd_persistent_id_is_refused(persistent_id: Any, tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return persistent_id if obj == "outside" else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(["outside"])
    path = save(torch.ones(1), tmp_path / "saved.pt")
    changed = rewrite(path, lambda name, old: buffer.getvalue() if name.endswith("data.pkl") else old)
    with pytest.raises(CaptureError, match=r"changed\.pt is damaged"):
        load_restricted(changed)


@pytest.mark.parametrize("protocol", [0, 3, 4, 5])
def test_pickle_of_another_protocol_says_so(protocol: int, tmp_path: Path) -> None:
    torch.save(torch.ones(1), tmp_path / "saved.pt", pickle_protocol=protocol)
    with pytest.raises(
        CaptureError, match="its pickle is not of protocol 2, which torch.save writes by default"
    ):
        load_restricted(tmp_path / "saved.pt")


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


def test_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = save({"a": torch.ones(8), "b": Config(1)}, tmp_path / "saved.pt")
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(CaptureError):
            load_restricted(path)


def test_every_changed_byte_is_read_or_refused(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save({"a": torch.ones(4), "b": Config(1), "c": {1: (2, 3)}}, tmp_path / "saved.pt")
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
    with pytest.raises(CaptureError, match="data/0 has 28 bytes, the pickle says 32"):
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
    with pytest.raises(CaptureError, match=r"saved\.pt is damaged"):
        load_restricted(path)
