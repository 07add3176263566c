"""Values as JSON and back: what was written is read, and what is damaged is refused with its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

import pytest
import torch

from minimax_tools.json_codec import DecodeError, decode, decode_fields, encode, encode_fields, omit_default


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: int
    y: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    low: int
    high: int

    def to_json(self) -> list[int]:
        return [self.low, self.high]

    @classmethod
    def from_json(cls, record: Any) -> Pair:
        low, high = decode(tuple[int, int], record)
        return cls(low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    points: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        return {"count": len(self.points), **encode_fields(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Counted:
        return decode_fields(cls, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    colour: Colour
    point: Point | None
    pair: Pair
    counted: Counted
    layers: range
    dtype: torch.dtype
    by_layer: Mapping[int, tuple[str, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_right: bool = True
    note: str | None = None


omit_default(Everything, "note")

VALUE = Everything(
    colour=Colour.BLUE,
    point=Point(x=1, y=0.5),
    pair=Pair(low=1, high=2),
    counted=Counted(points=(Point(x=3), Point(x=4))),
    layers=range(2, 5),
    dtype=torch.bfloat16,
    by_layer=MappingProxyType({7: ("a", "b")}),
    options={"mixed": [1, None, "x"]},
)
RECORD = {
    "colour": "blue",
    "point": {"x": 1, "y": 0.5},
    "pair": [1, 2],
    "counted": {"count": 2, "points": [{"x": 3, "y": 0.0}, {"x": 4, "y": 0.0}]},
    "layers": [2, 5],
    "dtype": "bfloat16",
    "by_layer": {"7": ["a", "b"]},
    "options": {"mixed": [1, None, "x"]},
    "is_right": True,
}


def test_value_is_written_as_json_and_read_back() -> None:
    written = encode(VALUE)
    assert written == RECORD
    assert json.loads(json.dumps(written)) == RECORD
    assert decode(Everything, written) == VALUE


def test_keys_that_nobody_knows_are_ignored_and_defaults_are_filled_in() -> None:
    record = {name: value for name, value in RECORD.items() if name not in {"options", "is_right"}}
    assert decode(Everything, {**record, "of_a_newer_mm2": 1}).is_right


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("colour", "green", r"\$\.colour"),
        ("point", {"y": 1.0}, r"'?x'? .*\$\.point|\$\.point.*x"),
        ("point", {"x": 1.5}, r"expected a whole number, found 1\.5 @ \$\.point\.x"),
        ("point", {"x": 1, "y": "0.5"}, r"expected a number, found '0\.5' @ \$\.point\.y"),
        ("counted", {"points": [{"x": 1}, {}]}, r"\$\.counted"),
        ("dtype", "no_such", r"expected a dtype, found 'no_such' @ \$\.dtype"),
        ("is_right", 1, r"expected true or false, found 1 @ \$\.is_right"),
        ("note", 5, r"expected text, found 5 @ \$\.note"),
    ],
)
def test_damage_is_named_with_its_place(key: str, value: Any, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        decode(Everything, {**RECORD, key: value})


@pytest.mark.parametrize("record", [None, [1], "ab", {"low": 1}])
def test_damaged_record_of_a_class_with_its_own_layout_is_refused(record: Any) -> None:
    with pytest.raises(DecodeError):
        decode(Pair, record)


def test_field_has_the_key_that_it_is_given() -> None:
    assert encode_fields(Point(x=1, y=2.0), y="height") == {"x": 1, "height": 2.0}
    assert decode_fields(Point, {"x": 1, "height": 2.0}, y="height") == Point(x=1, y=2.0)
    assert encode_fields(Point(x=1, y=2.0)) == {"x": 1, "y": 2.0}


def test_number_beyond_the_largest_float_is_refused() -> None:
    with pytest.raises(DecodeError, match="expected a number"):
        decode(float, 10**400)


def test_many_faults_are_described_by_a_few_and_a_long_value_is_cut() -> None:
    with pytest.raises(DecodeError) as caught:
        decode(tuple[int, ...], [None] * 100_000)
    assert str(caught.value).count("expected") == 12
    with pytest.raises(DecodeError) as caught:
        decode(int, "x" * 100_000)
    assert len(str(caught.value)) < 500
