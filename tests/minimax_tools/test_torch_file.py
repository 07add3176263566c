"""Hand-made pickles in archives: each attack first works on Python's own unpickler, and then does nothing here."""

from __future__ import annotations

import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.errors import CaptureError, CheckpointError, Mm2Error
from minimax_tools.torch_file import InertRecord, TorchFile, refusing, word_kind


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


_ARMED = f"{Armed.__module__}\n{Armed.__qualname__}\n".encode()


def _text(text: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(text.encode())) + text.encode()


# What a file tries, and whether its value is then a record.
ATTACKS: dict[str, tuple[Callable[[str], bytes], bool]] = {
    "REDUCE": (lambda path: b"cpathlib\nos.mkdir\n" + _text(path) + b"\x85R.", True),
    "REDUCE of a blocked module": (lambda path: b"cos\nmkdir\n" + _text(path) + b"\x85R.", False),
    "NEWOBJ": (lambda path: b"c" + _ARMED + _text(path) + b"\x85\x81.", True),
    "BUILD and __setstate__": (
        lambda path: b"c" + _ARMED + b")\x81}" + _text("path") + _text(path) + b"sb.",
        True,
    ),
    "SETITEM": (lambda path: b"c" + _ARMED + b")\x81" + _text("key") + _text(path) + b"s.", True),
    "eval": (
        lambda path: b"cbuiltins\neval\n" + _text(f"__import__('os').mkdir({path!r})") + b"\x85R.",
        True,
    ),
    "exec": (
        lambda path: b"cbuiltins\nexec\n" + _text(f"__import__('os').mkdir({path!r})") + b"\x85R.",
        True,
    ),
    "result of partial": (
        lambda path: b"cfunctools\npartial\ncpathlib\nos.mkdir\n" + _text(path) + b"\x86R)R.",
        False,
    ),
    "REDUCE in REDUCE": (
        lambda path: (
            b"cbuiltins\nlist\ncbuiltins\nmap\ncpathlib\nos.mkdir\n" + _text(path) + b"\x85\x86R\x85R."
        ),
        True,
    ),
    "set of a map": (
        lambda path: (
            b"cbuiltins\nset\ncbuiltins\nmap\ncpathlib\nos.mkdir\n" + _text(path) + b"\x85\x86R\x85R."
        ),
        False,
    ),
    "memo": (lambda path: b"cpathlib\nos.mkdir\nq\x00h\x00" + _text(path) + b"\x85R.", True),
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


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"K\x01",
        b".",
        b"\xff.",
        b"t.",
        b"h\x05.",
        b"(K\x01\x81.",
        b"K\x01K\x02a.",
        b"}K\x01s.",
        b"}]K\x02s.",
        b"X\xff\xff\xff\x7fshort.",
    ],
)
def test_senseless_pickle_is_refused(content: bytes, tmp_path: Path) -> None:
    path = archive(tmp_path / "saved.pt", b"\x80\x02" + content)
    with pytest.raises(CheckpointError, match=r"saved\.pt is damaged, or torch\.save did not write it"):
        with refusing(path, CheckpointError, next_step="Fetch it again."):
            TorchFile(path)


def test_refusal_leaves_out_the_advice_to_load_unsafely(tmp_path: Path) -> None:
    path = archive(tmp_path / "saved.pt", b"\x80\x02K\x01K\x02a.")
    with pytest.raises(CheckpointError) as caught:
        with refusing(path, CheckpointError, next_step="Fetch it again."):
            TorchFile(path)
    assert caught.value.found == "UnpicklingError: Can only append to lists, but got <class 'int'>"


@pytest.mark.parametrize("error_type", [CaptureError, CheckpointError])
def test_fault_becomes_the_error_of_who_reads(error_type: type[CaptureError], tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    path.write_bytes(b"text")
    with pytest.raises(error_type, match=r"saved\.pt is damaged.*Do this"):
        with refusing(path, error_type, next_step="Do this."):
            TorchFile(path)
    with pytest.raises(error_type, match=r"cannot read .*gone\.pt"):
        with refusing(tmp_path / "gone.pt", error_type, next_step="Do this."):
            TorchFile(tmp_path / "gone.pt")


def test_error_of_our_own_passes_through(tmp_path: Path) -> None:
    with pytest.raises(Mm2Error, match="^mine$"):
        with refusing(tmp_path, CheckpointError, next_step="Do this."):
            raise Mm2Error("mine")
