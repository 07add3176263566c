"""Hand-made pickles: each attack first works on Python's own unpickler, and then does nothing here."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.torch_files.inert import InertRecord, Vocabulary, load_inert

_EXTENSION_CODE = 0xF0


class Armed:
    """Makes a directory whenever anything of it is called."""

    def __new__(cls, path: str | None = None) -> Armed:
        if path is not None:
            Path(path).mkdir()
        return super().__new__(cls)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Path(state["path"]).mkdir()

    def append(self, path: str) -> None:
        Path(path).mkdir()

    def __setitem__(self, key: str, path: str) -> None:
        Path(path).mkdir()


_ARMED = f"{Armed.__module__}\n{Armed.__qualname__}\n".encode()


def _text(text: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(text.encode())) + text.encode()


def _stack_global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + pickle.STACK_GLOBAL


ATTACKS: dict[str, Callable[[str], bytes]] = {
    "GLOBAL and REDUCE": lambda path: b"cos\nmkdir\n" + _text(path) + b"\x85R.",
    "STACK_GLOBAL and REDUCE": lambda path: (
        b"\x80\x04" + _stack_global("os", "mkdir") + _text(path) + b"\x85R."
    ),
    "dotted STACK_GLOBAL": lambda path: (
        b"\x80\x04" + _stack_global("shutil", "os.mkdir") + _text(path) + b"\x85R."
    ),
    "INST": lambda path: b"(" + _text(path) + b"ios\nmkdir\n.",
    "OBJ": lambda path: b"(cos\nmkdir\n" + _text(path) + b"o.",
    "NEWOBJ": lambda path: b"\x80\x02c" + _ARMED + _text(path) + b"\x85\x81.",
    "NEWOBJ_EX": lambda path: b"\x80\x04c" + _ARMED + b")}" + _text("path") + _text(path) + b"s\x92.",
    "BUILD and __setstate__": lambda path: (
        b"\x80\x02c" + _ARMED + b")\x81}" + _text("path") + _text(path) + b"sb."
    ),
    "APPEND": lambda path: b"\x80\x02c" + _ARMED + b")\x81" + _text(path) + b"a.",
    "SETITEM": lambda path: b"\x80\x02c" + _ARMED + b")\x81" + _text("key") + _text(path) + b"s.",
    "eval": lambda path: b"cbuiltins\neval\n" + _text(f"__import__('os').mkdir({path!r})") + b"\x85R.",
    "exec": lambda path: b"cbuiltins\nexec\n" + _text(f"__import__('os').mkdir({path!r})") + b"\x85R.",
    "result of partial": lambda path: b"cfunctools\npartial\n(cos\nmkdir\n" + _text(path) + b"tR)R.",
    "result of getattr": lambda path: (
        b"cbuiltins\ngetattr\ncbuiltins\n__import__\n"
        + _text("os")
        + b"\x85R"
        + _text("mkdir")
        + b"\x86R"
        + _text(path)
        + b"\x85R."
    ),
    "REDUCE in REDUCE": lambda path: (
        b"cbuiltins\nlist\ncbuiltins\nmap\ncos\nmkdir\n" + _text(path) + b"\x85\x86R\x85R."
    ),
    "memo": lambda path: b"cos\nmkdir\nq\x000h\x00" + _text(path) + b"\x85R.",
    "EXT1": lambda path: b"\x80\x02\x82" + bytes([_EXTENSION_CODE]) + _text(path) + b"\x85R.",
    "EXT2": lambda path: b"\x80\x02\x83" + struct.pack("<H", _EXTENSION_CODE) + _text(path) + b"\x85R.",
    "EXT4": lambda path: b"\x80\x02\x84" + struct.pack("<I", _EXTENSION_CODE) + _text(path) + b"\x85R.",
}


@pytest.fixture
def registered_extension() -> Iterator[None]:
    name = os.mkdir.__module__, "mkdir"
    copyreg.add_extension(*name, _EXTENSION_CODE)
    yield
    copyreg.remove_extension(*name, _EXTENSION_CODE)


def load(content: bytes) -> Any:
    vocabulary = Vocabulary(
        persistent_load=lambda found: InertRecord(module="", name="outside", args=(found,))
    )
    return load_inert(io.BytesIO(content), vocabulary)


@pytest.mark.usefixtures("registered_extension")
@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_that_python_falls_for_does_nothing_here(attack: str, tmp_path: Path) -> None:
    planted, untouched = tmp_path / "python", tmp_path / "mm2"
    pickle.loads(ATTACKS[attack](str(planted)))
    value = load(ATTACKS[attack](str(untouched)))

    assert planted.is_dir(), "the attack itself must be live"
    assert not untouched.exists()
    assert isinstance(value, InertRecord)


def test_extension_in_pythons_cache_does_nothing_here(registered_extension: None, tmp_path: Path) -> None:
    # Python keeps what a code stood for and then asks find_class no more.
    pickle.loads(ATTACKS["EXT1"](str(tmp_path / "first")))
    load(ATTACKS["EXT1"](str(tmp_path / "second")))
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_those_that_python_reads(protocol: int) -> None:
    value = {
        "numbers": [0, -1, 255, 65536, 2**40, -(2**70), 1.5, float("inf")],
        "texts": ["", "a", "ü\n", "x" * 300, "y" * 70000],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "constants": [None, True, False],
        ("flat", 1): {"nested": {"deeper": [[]]}},
        3: "integer key",
    }
    assert load(pickle.dumps(value, protocol=protocol)) == value


def test_values_newer_protocols_have_opcodes_for_are_read() -> None:
    value = [{1, "a"}, frozenset({2}), b"bytes", bytearray(b"array")]
    assert load(pickle.dumps(value, protocol=5)) == value


def test_shared_and_circular_values_stay_so() -> None:
    shared: list[Any] = [1]
    value = {"first": shared, "second": shared}
    shared.append(value)
    loaded = load(pickle.dumps(value))
    assert loaded["first"] is loaded["second"]
    assert loaded["first"][1] is loaded


def test_record_tells_class_arguments_and_state() -> None:
    record = load(b"\x80\x02cthere.is\nNo.such\n" + b"K\x07\x85\x81}" + _text("size") + b"K\x08sb.")
    assert (record.module, record.name) == ("there.is", "No.such")
    assert (record.args, record.state) == ((7,), {"size": 8})
    assert repr(record) == "<inert there.is.No.such>"


def test_record_that_is_only_named_has_no_arguments() -> None:
    assert load(b"cos\nmkdir\n.").args is None


def test_record_keeps_what_was_put_into_it() -> None:
    listed = load(b"\x80\x02cmine\nList\n)\x81(K\x01K\x02e.")
    keyed = load(b"\x80\x02cmine\nDict\n)\x81" + _text("key") + b"K\x01s.")
    assert listed.items == [1, 2]
    assert keyed.items == [("key", 1)]


def test_call_of_a_plain_value_is_a_record() -> None:
    record = load(_text("not callable") + b")R.")
    assert (record.name, record.args) == ("str()", ("not callable",))


@pytest.mark.parametrize("nesting", [b"\x85", b"2\x86"], ids=["deep", "exponential"])
def test_key_that_python_could_not_hash_is_wrapped(nesting: bytes) -> None:
    # 100 000 levels overflow the C stack of hash(); 2**100 000 elements never end.
    loaded = load(b"}K\x01" + nesting * 100_000 + b"K\x02s.")
    (key,) = loaded
    assert isinstance(key, InertRecord)
    assert loaded[key] == 2


def test_unhashable_key_is_wrapped() -> None:
    (key,) = load(b"}]K\x02s.")
    assert isinstance(key, InertRecord)


def test_reference_outside_goes_to_the_vocabulary() -> None:
    assert load(b"Pname\n.").args == ("name",)
    assert load(b"K\x05Q.").args == (5,)


def test_next_pickle_of_a_stream_follows() -> None:
    stream = io.BytesIO(pickle.dumps(1) + pickle.dumps("two") + b"rest")
    vocabulary = Vocabulary(persistent_load=lambda found: found)
    assert [load_inert(stream, vocabulary), load_inert(stream, vocabulary)] == [1, "two"]
    assert stream.read() == b"rest"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"K\x01",
        b".",
        b"\xff.",
        b"0.",
        b"1.",
        b"t.",
        b"h\x05.",
        b"(K\x01\x81.",
        b"K\x01K\x02a.",
        b"K\x01K\x02K\x03s.",
        b"(K\x01K\x02K\x03d.",
        b"\x97.",
        b"K\x01K\x02\x93.",
        b"cos\nmkdir\nK\x01R.",
        b"X\xff\xff\xff\x7fshort.",
    ],
)
def test_senseless_pickle_is_refused(content: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        load(content)
