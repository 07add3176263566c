"""Files of torch.save: what they hold is read, what is wrong with them is named, and nothing in them is called.

The attacks are hand-made pickles: each first works on Python's own unpickler, and then does nothing here.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from minimax_tools.dumps.tensor_file import list_tensors, load_restricted, read_tensor
from minimax_tools.errors import CaptureError, CheckpointError, Mm2Error
from minimax_tools.torch_file import InertRecord, TorchFile, refusing, word_kind

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128, torch.bool]
DTYPES += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES += [torch.int8, torch.int16, torch.int32, torch.int64]


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
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def rewrite(
    path: Path, change: Callable[[str, bytes], bytes], *, compression: int = zipfile.ZIP_STORED
) -> Path:
    """The archive at `path` with every record changed, its checksums right again."""
    changed = path.with_name("changed.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(changed, "w", compression) as target:
        for record in source.infolist():
            target.writestr(record.filename, change(record.filename, source.read(record)))
    return changed


@contextmanager
def without_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_any_dtype_and_shape_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    content = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    tensors = [content.view(dtype).reshape(shape) for shape in ((2, 3), (6, 1, 1))]
    tensors += [tensors[0][0, 1], tensors[0][:0]]
    for loaded, tensor in zip(reload(tensors, tmp_path), tensors, strict=True):
        assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
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


def test_lazy_conjugation_and_negation_are_kept(tmp_path: Path) -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    loaded = reload([tensor.conj(), tensor.clone().conj().imag], tmp_path)
    assert torch.equal(loaded[0], tensor.conj())
    assert torch.equal(loaded[1], -tensor.imag)


def test_parameter_comes_as_plain_tensor(tmp_path: Path) -> None:
    loaded = read_tensor(save(torch.nn.Parameter(torch.ones(2)), tmp_path / "saved.pt"), ())
    assert type(loaded) is torch.Tensor
    assert not loaded.requires_grad


def test_tensor_of_an_xla_device_is_listed_and_read(tmp_path: Path) -> None:
    tensor = torch.randn(2, 3).bfloat16()
    args = (tensor.dtype, "xla:0", False)
    now = Call(torch._utils._rebuild_device_tensor_from_cpu_tensor, tensor, *args)
    # Of this many that are no records of the file, some lie where one would.
    rebuild = torch._utils._rebuild_device_tensor_from_numpy
    before = [Call(rebuild, tensor.float().numpy(), *args) for _ in range(300)]
    for loaded in reload([now, *before], tmp_path):
        assert torch.equal(loaded, tensor)
    held = list_tensors(tmp_path / "saved.pt")[1]
    assert (held.keys, held.shape, held.dtype) == ((1,), (2, 3), "bfloat16")
    assert torch.equal(read_tensor(tmp_path / "saved.pt", held.keys), tensor)


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
        reload(np.array([None], dtype=object), tmp_path)


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
    with pytest.raises(CaptureError, match="its pickle is not of protocol 2, which torch.save writes by"):
        load_restricted(tmp_path / "saved.pt")


def test_file_saved_without_checksums_is_read(tmp_path: Path) -> None:
    with without_checksums():
        assert torch.equal(reload(torch.ones(3), tmp_path), torch.ones(3))


def test_flipped_bit_in_a_tensor_is_found(tmp_path: Path) -> None:
    path = save(torch.full((64,), 7.0), tmp_path / "saved.pt")
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<f", 7.0)) + 9] ^= 1
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=r"saved\.pt is damaged.*checksum.*[Cc]opy it again"):
        load_restricted(path)


def test_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = save({"a": torch.ones(8), "b": PurePosixPath("a/b")}, tmp_path / "saved.pt")
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(CaptureError):
            load_restricted(path)


def test_every_changed_byte_is_read_or_refused(tmp_path: Path) -> None:
    with without_checksums():
        path = save({"a": torch.ones(4), "b": PurePosixPath("a/b"), "c": {1: (2, 3)}}, tmp_path / "saved.pt")
    content = path.read_bytes()
    refused = 0
    for position in range(len(content)):
        value = (0, 0x52, 0xFF)[position % 3]  # 0x52 is REDUCE
        path.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
        try:
            load_restricted(path)
        except CaptureError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", pickle.dumps({"a": 1}), b"\x00" * 1000])
def test_file_that_is_not_torchs_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=r"other\.pt is damaged, or torch\.save did not write it"):
        load_restricted(path)


@pytest.mark.parametrize(
    ("record", "change", "compression", "said"),
    [
        ("", bytes, zipfile.ZIP_DEFLATED, "compressed"),
        ("byteorder", lambda _: b"big", zipfile.ZIP_STORED, "little-endian"),
        ("data/0", lambda old: old[:-4], zipfile.ZIP_STORED, "data/0 has 4092 bytes, the pickle says 4096"),
    ],
)
def test_archive_that_torch_would_not_write_is_refused(
    record: str, change: Callable[[bytes], bytes], compression: int, said: str, tmp_path: Path
) -> None:
    path = save(torch.zeros(1024), tmp_path / "saved.pt")

    def change_record(name: str, old: bytes) -> bytes:
        return change(old) if name.endswith(record) else old

    changed = rewrite(path, change_record, compression=compression)
    with pytest.raises(CaptureError, match=said):
        load_restricted(changed)


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (9,), (1,)), (1, (8,), (1,)), (0, (2,), (8,)), (-1, (2,), (1,)), (0, (-1,), (1,))],
)
def test_tensor_that_reaches_outside_its_storage_is_refused(
    offset: int, size: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path
) -> None:
    storage = torch.ones(8).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    place: Any = (typed, offset, size, stride, False, collections.OrderedDict())
    path = save(Call(torch._utils._rebuild_tensor_v2, *place), tmp_path / "saved.pt")
    with pytest.raises(CaptureError, match=r"saved\.pt is damaged"):
        load_restricted(path)


class Armed:
    """Makes a directory whenever anything of it is called."""

    def __new__(cls, path: str | None = None) -> Armed:
        if path is not None:
            Path(path).mkdir()
        return super().__new__(cls)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Path(state["path"]).mkdir()

    def __setitem__(self, key: str, path: str) -> None:
        Path(path).mkdir()


_ARMED = f"c{Armed.__module__}\n{Armed.__qualname__}\n".encode()
_MKDIR = b"cpathlib\nos.mkdir\n"


def _text(text: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(text.encode())) + text.encode()


def _evaluating(name: bytes) -> Callable[[str], bytes]:
    return lambda path: b"cbuiltins\n" + name + _text(f"__import__('os').mkdir({path!r})") + b"\x85R."


def _mapping(name: bytes) -> Callable[[str], bytes]:
    """A container of a map, which calls as it is filled."""
    begun = b"cbuiltins\n" + name + b"\ncbuiltins\nmap\n" + _MKDIR
    return lambda path: begun + _text(path) + b"\x85\x86R\x85R."


# What a file tries, and whether its value is then a record.
ATTACKS: dict[str, tuple[Callable[[str], bytes], bool]] = {
    "REDUCE": (lambda path: _MKDIR + _text(path) + b"\x85R.", True),
    "REDUCE of a blocked module": (lambda path: b"cos\nmkdir\n" + _text(path) + b"\x85R.", False),
    "NEWOBJ": (lambda path: _ARMED + _text(path) + b"\x85\x81.", True),
    "BUILD and __setstate__": (lambda path: _ARMED + b")\x81}" + _text("path") + _text(path) + b"sb.", True),
    "SETITEM": (lambda path: _ARMED + b")\x81" + _text("key") + _text(path) + b"s.", True),
    "eval": (_evaluating(b"eval\n"), True),
    "exec": (_evaluating(b"exec\n"), True),
    "result of partial": (
        lambda path: b"cfunctools\npartial\n" + _MKDIR + _text(path) + b"\x86R)R.",
        False,
    ),
    "REDUCE in REDUCE": (_mapping(b"list"), True),
    "set of a map": (_mapping(b"set"), False),
    "memo": (lambda path: _MKDIR + b"q\x00h\x00" + _text(path) + b"\x85R.", True),
}


def archive(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3")
    return path


def load(content: bytes, tmp_path: Path) -> Any:
    return TorchFile(archive(tmp_path / "saved.pt", b"\x80\x02" + content)).value


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_that_python_falls_for_does_nothing_here(attack: str, tmp_path: Path) -> None:
    build, is_read = ATTACKS[attack]
    planted, untouched = tmp_path / "python", tmp_path / "mm2"
    pickle.loads(b"\x80\x04" + build(str(planted)))
    assert planted.is_dir(), "the attack itself must be live"

    if is_read:
        assert isinstance(load(build(str(untouched)), tmp_path), InertRecord)
    else:
        with pytest.raises((pickle.UnpicklingError, TypeError)):
            load(build(str(untouched)), tmp_path)
    assert not untouched.exists()


def test_name_that_a_port_marked_as_safe_is_not_called(tmp_path: Path) -> None:
    marked: Any = (shutil.rmtree, Armed)
    victim = tmp_path / "kept"
    victim.mkdir()
    with torch.serialization.safe_globals(marked):
        record = load(b"cshutil\nrmtree\n" + _text(str(victim)) + b"\x85R.", tmp_path)
        assert set(torch.serialization.get_safe_globals()) >= set(marked)
    assert isinstance(record, InertRecord)
    assert victim.is_dir()


def test_names_of_a_file_are_not_safe_afterwards(tmp_path: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    load(b"cthere.is\nNo\n)R.", tmp_path)
    with pytest.raises(pickle.UnpicklingError):
        load(b"cthere.is\nNo\n)R)R.", tmp_path)
    assert set(torch.serialization.get_safe_globals()) == before


def test_threads_read_files_of_other_names(tmp_path: Path) -> None:
    paths = [
        archive(tmp_path / str(number), b"\x80\x02cthere.is\nNo%d\n)\x81}b." % (number % 3))
        for number in range(24)
    ]
    with ThreadPoolExecutor(8) as pool:
        for number, file in enumerate(pool.map(TorchFile, paths)):
            assert file.value.kind == f"there.is.No{number % 3}"


def test_record_tells_class_arguments_state_and_pairs(tmp_path: Path) -> None:
    content = b"cthere.is\nNo.such\nK\x07\x85\x81}" + _text("size") + b"K\x08sb" + _text("key") + b"K\x09s."
    record = load(content, tmp_path)
    assert (record.kind, record.args, record.state) == ("there.is.No.such", (7,), {"size": 8})
    assert record.pairs == [("key", 9)]
    assert repr(record) == "<inert there.is.No.such>"
    assert word_kind(record) == "object of there.is.No.such"


def test_numpy_array_cannot_be_filled_twice(tmp_path: Path) -> None:
    # A tensor made of it would otherwise lie in memory that is no longer its own.
    dtype = b"cnumpy\ndtype\n" + _text("u1") + b"\x85R"
    state = b"(K\x01K\x02\x85" + dtype + b"\x89cbuiltins\nbytearray\n]K\x01aK\x02a\x85Rtb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n)R" + state
    assert load(array + b".", tmp_path).tolist() == [1, 2]
    with pytest.raises(ValueError, match="fills a numpy array twice"):
        load(array + state + b".", tmp_path)


SENSELESS = [b"", b"K\x01", b".", b"\xff.", b"t.", b"h\x05.", b"(K\x01\x81.", b"K\x01K\x02a.", b"}K\x01s."]
SENSELESS += [b"}]K\x02s.", b"X\xff\xff\xff\x7fshort."]


@pytest.mark.parametrize("content", SENSELESS)
def test_senseless_pickle_is_refused_without_the_advice_to_load_unsafely(
    content: bytes, tmp_path: Path
) -> None:
    path = archive(tmp_path / "saved.pt", b"\x80\x02" + content)
    with pytest.raises(CheckpointError, match=r"saved\.pt is damaged, or torch\.save did not wr") as caught:
        with refusing(path, CheckpointError, next_step="Fetch it again."):
            TorchFile(path)
    assert "weights_only" not in str(caught.value)
    if content == b"K\x01K\x02a.":
        assert caught.value.found == "UnpicklingError: Can only append to lists, but got <class 'int'>"


@pytest.mark.parametrize("error_type", [CaptureError, CheckpointError])
def test_fault_becomes_the_error_of_who_reads(error_type: type[CaptureError], tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    path.write_bytes(b"text")
    with pytest.raises(error_type, match=r"saved\.pt is damaged.*Do this"):
        with refusing(path, error_type, next_step="Do this."):
            TorchFile(path)
    with pytest.raises(error_type, match=r"cannot read .*gone\.pt: found No such file.*Check the path"):
        with refusing(tmp_path / "gone.pt", error_type, next_step="Do this."):
            TorchFile(tmp_path / "gone.pt")


def test_error_of_our_own_passes_through(tmp_path: Path) -> None:
    with pytest.raises(Mm2Error, match="^mine$"):
        with refusing(tmp_path, CheckpointError, next_step="Do this."):
            raise Mm2Error("mine")
