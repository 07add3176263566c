"""Values as JSON and back, by the type hints of dataclasses: cattrs, strict about numbers and text.

    encode(value) -> what json.dumps takes            decode(Kind, record) -> a Kind

| value | JSON |
|---|---|
| dataclass | object with one key for each field |
| enum | its value |
| `torch.dtype` | its name |
| range | its two ends |
| class with the methods `to_json` and `from_json` | their result |
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

import cattrs
import torch
from cattrs.strategies import use_class_methods

T = TypeVar("T")

# JSON types in words, for messages.
_FORM = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class DecodeError(ValueError):
    """A record of another form than expected; the message names each place and the expected form."""


def encode(value: Any) -> Any:
    """Return a value as json.dumps takes it: dicts, lists, text, numbers, booleans and None."""
    return _CONVERTER.unstructure(value)


def decode(kind: type[T], record: Any) -> T:
    """Return the value that `encode` turned into `record`; unknown keys are ignored.

    Raises:
        DecodeError: A key is missing, a value is of another type, or a constructor refuses it.
    """
    try:
        return _CONVERTER.structure(record, kind)
    except cattrs.BaseValidationError as error:
        raise DecodeError("; ".join(cattrs.transform_error(error, format_exception=_describe))) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DecodeError(_describe(error, kind)) from error


def encode_fields(value: Any, **keys: str) -> dict[str, Any]:
    """Return a dataclass as an object with one key for each field, for a class whose `to_json` changes that object.

    A field's key is its name, or the one that `keys` gives it: `encode_fields(file, size_bytes="size")`.
    """
    kind: Any = type(value)
    record: dict[str, Any] = _field_writer(kind, **keys)(value)
    return record


def decode_fields(kind: type[T], record: Mapping[str, Any], **keys: str) -> T:
    """Return a dataclass from an object that `encode_fields` made with the same `keys`."""
    # mypy cannot type a cached function whose result depends on its argument.
    hint: Any = kind
    value: T = _field_reader(hint, **keys)(record, hint)
    return value


def omit_default(kind: type[T], *fields: str) -> None:
    """Leave these fields of a dataclass out of its JSON from now on, if they hold their default."""
    overrides: Any = {name: cattrs.override(omit_if_default=True) for name in fields}
    _CONVERTER.register_unstructure_hook(
        kind, cattrs.gen.make_dict_unstructure_fn(kind, _CONVERTER, **overrides)
    )


# Cached because cattrs writes the source of such a function, and compiles it.
@functools.cache
def _field_writer(kind: Any, **keys: str) -> Any:
    return cattrs.gen.make_dict_unstructure_fn(kind, _CONVERTER, **_renamed(keys))


@functools.cache
def _field_reader(kind: Any, **keys: str) -> Any:
    return cattrs.gen.make_dict_structure_fn(kind, _CONVERTER, **_renamed(keys))


def _renamed(keys: dict[str, str]) -> dict[str, Any]:
    return {field: cattrs.override(rename=key) for field, key in keys.items()}


def _describe(error: BaseException, _: type | None) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _exactly(kind: type) -> Any:
    """Return a hook that refuses what cattrs would convert, such as "1" or true for the number 1."""

    def structure(record: Any, wanted: type) -> Any:
        if wanted is not kind:
            # cattrs calls this for subclasses too, such as an enum of text.
            return wanted(record)
        if kind is float and type(record) is int:
            return float(record)
        # A bool is an int in Python, but not in JSON.
        if type(record) is not kind:
            raise TypeError(f"expected {_FORM[kind]}, found {record!r}")
        return record

    return structure


def _number_or_text(record: Any, _: Any) -> int | float | str:
    if type(record) not in (int, float, str):
        raise TypeError(f"expected a number or text, found {record!r}")
    value: int | float | str = record
    return value


def _dtype(name: Any, _: type) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"expected a dtype, found {name!r}")
    return dtype


def _has_number_keys(kind: Any) -> bool:
    return typing.get_origin(kind) in (Mapping, dict) and typing.get_args(kind)[0] is int


def _read_number_keys(kind: Any, converter: cattrs.Converter) -> Any:
    _, hint = typing.get_args(kind)
    return lambda record, _: {int(key): converter.structure(value, hint) for key, value in record.items()}


def _write_number_keys(kind: Any, converter: cattrs.Converter) -> Any:
    _, hint = typing.get_args(kind)
    return lambda values: {str(key): converter.unstructure(value, hint) for key, value in values.items()}


def _build_converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    for kind in _FORM:
        converter.register_structure_hook(kind, _exactly(kind))
    # cattrs tells the kinds of a union apart by their fields alone.
    converter.register_structure_hook_func(lambda kind: kind == int | float | str, _number_or_text)
    converter.register_structure_hook(torch.dtype, _dtype)
    converter.register_unstructure_hook(torch.dtype, lambda dtype: str(dtype).removeprefix("torch."))
    converter.register_structure_hook(
        range, lambda record, _: range(*converter.structure(record, tuple[int, int]))
    )
    converter.register_unstructure_hook(range, lambda layers: [layers.start, layers.stop])
    converter.register_unstructure_hook(MappingProxyType, dict)
    converter.register_unstructure_hook(Enum, lambda member: member.value)
    # Keys of JSON objects are text, so a layer's number is written as one.
    converter.register_structure_hook_factory(_has_number_keys, _read_number_keys)
    converter.register_unstructure_hook_factory(_has_number_keys, _write_number_keys)
    use_class_methods(converter, "from_json", "to_json")
    return converter


_CONVERTER = _build_converter()
