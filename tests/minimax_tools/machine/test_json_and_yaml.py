"""JSON and YAML that somebody else wrote: plain values, one kind of error, and bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.machine.json_file import MAX_DEPTH, JsonError, parse_json, read_json, read_own_json
from minimax_tools.machine.yaml_file import compose_yaml, read_yaml


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_value_is_that_of_pythons_reader(path: Path) -> None:
    for value in ({"a": [1, 2.5, None, True, "ü"]}, [], "text", 7, None):
        path.write_text(json.dumps(value), encoding="utf-8")
        assert read_json(path) == parse_json(path.read_bytes()) == value
    assert parse_json('"\\ud83d\\ude00"') == "\N{GRINNING FACE}"
    assert parse_json('[{"a": {"b": 1}}]', object_hook=len) == [1]


def test_depth_counts_no_brackets_in_strings() -> None:
    text = json.dumps(["[" * 1000, nested(MAX_DEPTH)])
    assert parse_json(text)[0] == "[" * 1000
    assert parse_json(nested(MAX_DEPTH)) is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (nested(MAX_DEPTH + 1), "nested more than 64 deep"),
        (nested(100_000), "nested more than 64 deep"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested more than 64 deep"),
        ("[" * 100_000, "nested more than 64 deep"),
        ('{"a": 1, "a": 1}', "the key 'a' twice in one object"),
        ('[{"b": {"a": 1, "c": 2, "a": 3}}]', "the key 'a' twice in one object"),
        # Half of a pair of surrogates is no text.
        ('"\\ud800"', "not Unicode"),
        ('{"\\uDC00": 1}', "not Unicode"),
        ('["\\udc00\\ud800"]', "not Unicode"),
    ],
)
def test_json_that_is_out_of_bounds_is_refused(text: str, message: str) -> None:
    with pytest.raises(JsonError, match=message):
        parse_json(text)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1,]", b"\x00" * 100, b"9" * 10_000])
def test_what_is_no_json_has_one_error(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(JsonError):
        read_json(path)


def test_file_without_end_is_refused() -> None:
    with pytest.raises(JsonError, match="more than 536,870,912 bytes"):
        read_json(Path("/dev/zero"))


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", "1e999"])
def test_file_of_mm2s_own_holds_finite_numbers(text: str, path: Path) -> None:
    path.write_text(text)
    read_json(path)
    with pytest.raises(JsonError, match="not finite"):
        read_own_json(path)
    path.write_text("[1.5e300, -2]")
    assert read_own_json(path) == [1.5e300, -2]


def test_plain_values_of_yaml_are_read(path: Path) -> None:
    path.write_text("a: [1, x, true, null]\nb: {c: 1.5}")
    assert read_yaml(path) == {"a": [1, "x", True, None], "b": {"c": 1.5}}
    path.write_text(nested(64))
    assert read_yaml(path) is not None
    path.write_text("# nothing")
    assert read_yaml(path) is compose_yaml(path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "is not valid YAML"),
        ("[" * 65 + "]" * 65, "line 1, column 65: values nested more than 64 deep"),
        ("a: &x [1]\nb: *x", "line 2, column 4: the alias *x, which mm2 does not read"),
        ("a: &x [*x]", "alias"),
        ("a: 1\na: 2", "names 'a' twice: found the second in line 2"),
        ("a: 2026-99-99", "is not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("a: [", "is not valid YAML"),
        ("a: \x07", "is not valid YAML"),
    ],
)
def test_mistake_in_yaml_is_one_error_that_names_the_file(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
