"""JSON that somebody else wrote: one kind of error, and bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minimax_tools.machine.json_file import MAX_DEPTH, JsonError, parse_json, read_json, read_own_json


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, "ü"]}, [], "text", 7, None])
def test_value_is_that_of_pythons_reader(value: object, tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    assert read_json(path) == parse_json(path.read_bytes()) == value


def test_object_hook_takes_each_object() -> None:
    assert parse_json('[{"a": {"b": 1}}]', object_hook=len) == [1]


@pytest.mark.parametrize(
    "text", [nested(MAX_DEPTH + 1), nested(100_000), '{"a":' * 100 + "1" + "}" * 100, "[" * 100_000]
)
def test_deep_nesting_is_refused(text: str) -> None:
    with pytest.raises(JsonError, match="nested more than 64 deep"):
        parse_json(text)


def test_depth_counts_no_brackets_in_strings() -> None:
    text = json.dumps(["[" * 1000, nested(MAX_DEPTH)])
    assert parse_json(text)[0] == "[" * 1000
    assert parse_json(nested(MAX_DEPTH)) is not None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1,]", b"\x00" * 100, b"9" * 10_000])
def test_what_is_no_json_has_one_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_bytes(content)
    with pytest.raises(JsonError):
        read_json(path)


def test_file_without_end_is_refused() -> None:
    with pytest.raises(JsonError, match="more than 536,870,912 bytes"):
        read_json(Path("/dev/zero"))


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 2, "a": 3}}]'])
def test_key_that_is_there_twice_is_named(text: str) -> None:
    with pytest.raises(JsonError, match="the key 'a' twice in one object"):
        parse_json(text)


@pytest.mark.parametrize("text", ['"\\ud800"', '{"\\uDC00": 1}', '["\\udc00\\ud800"]'])
def test_half_of_a_pair_of_surrogates_is_no_text(text: str) -> None:
    with pytest.raises(JsonError, match="not Unicode"):
        parse_json(text)
    assert parse_json('"\\ud83d\\ude00"') == "\N{GRINNING FACE}"


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", "1e999"])
def test_file_of_mm2s_own_holds_finite_numbers(text: str, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(text)
    read_json(path)
    with pytest.raises(JsonError, match="not finite"):
        read_own_json(path)
    path.write_text("[1.5e300, -2]")
    assert read_own_json(path) == [1.5e300, -2]
