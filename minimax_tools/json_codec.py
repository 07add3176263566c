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

import dataclasses
import functools
import math
import reprlib
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import cattrs
from cattrs.errors import IterableValidationError, IterableValidationNote
from cattrs.strategies import use_class_methods

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# JSON types in words, for messages.
_FORM = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

# Faults of one list that a message names.
_MOST_FAULTS = 12
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


class DecodeError(ValueError):
    """A record of another form than expected; the message names each place and the expected form."""


def finite_or_none(value: float) -> float | None:
    """Return a figure, or None if it is infinite or NaN, which JSON does not have."""
    return value if math.isfinite(value) else None


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


def decode_version(kind: type[T], record: Mapping[str, Any], *, version: int) -> T:
    """Return the value of a file of mm2's own, whose key `schema_version` says which version wrote it.

    Raises:
        KeyError: The record has no version.
        ValueError: It has another version than this mm2 reads, or does not match the type.
    """
    found = decode(int, record["schema_version"])
    if found != version:
        raise ValueError(f"another mm2 wrote it: version {found}; this one reads {version}")
    return decode(kind, record)


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
    return _read_dataclass(kind, _CONVERTER, **_renamed(keys))


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
        value = _as_float(record) if kind is float else record
        # A bool is an int in Python, but not in JSON.
        if type(value) is not kind:
            raise TypeError(f"expected {_FORM[kind]}, found {_quote(record)}")
        return value

    return structure


def _as_float(record: Any) -> Any:
    """Return a number as a float; all else as None, and a whole number beyond the largest float."""
    if type(record) not in (int, float):
        return None
    try:
        return float(record)
    except OverflowError:
        return None


def _quote(record: Any) -> str:
    """Return a value as a message shows it: a damaged file may hold any."""
    return _SHORT.repr(record)


def _one_of_kinds(union: Any) -> Any:
    """Return a hook for a union of plain kinds, which cattrs tells apart by fields alone."""
    kinds = typing.get_args(union)

    def structure(record: Any, _: Any) -> Any:
        if type(record) not in kinds:
            expected = " or ".join(_FORM[kind] for kind in kinds)
            raise TypeError(f"expected {expected}, found {_quote(record)}")
        return record

    return structure


def _read_dataclass(kind: Any, converter: cattrs.Converter, **overrides: Any) -> Any:
    """Return a hook that reads objects: cattrs looks for fields in text too, and takes the defaults of all."""
    inner = cattrs.gen.make_dict_structure_fn(kind, converter, **overrides)

    def structure(record: Any, _: Any) -> Any:
        if not isinstance(record, Mapping):
            raise TypeError(f"expected an object, found {_quote(record)}")
        return inner(record, kind)

    return structure


def _is_plain_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType) and set(typing.get_args(kind)) <= set(
        _FORM
    )


def _is_sequence(kind: Any) -> bool:
    return typing.get_origin(kind) in (tuple, list, Sequence)


def _read_list(kind: Any, converter: cattrs.Converter) -> Any:
    """Return a hook that reads lists: cattrs also takes text and objects for lists, and describes every fault."""
    hints = typing.get_args(kind)
    is_open = typing.get_origin(kind) is not tuple or hints[-1] is ...

    def structure(record: Any, _: Any) -> Any:
        if not isinstance(record, list | tuple):
            raise TypeError(f"expected a list, found {_quote(record)}")
        item_hints = hints[:1] * len(record) if is_open else hints
        if len(record) != len(item_hints):
            raise ValueError(f"expected {len(item_hints)} values, found {len(record)}")
        values: list[Any] = []
        errors: list[Exception] = []
        for index, (item, hint) in enumerate(zip(record, item_hints, strict=True)):
            try:
                values.append(converter.structure(item, hint))
            except Exception as error:
                note = IterableValidationNote(f"in {kind}, at index {index}", index, hint)
                # Not by `add_note`, which Python 3.10 lacks.
                setattr(error, "__notes__", [*getattr(error, "__notes__", ()), note])  # noqa: B010
                errors.append(error)
            if len(errors) == _MOST_FAULTS:
                break
        if errors:
            raise IterableValidationError(f"faults in {kind}", errors, kind)
        return values if typing.get_origin(kind) is list else tuple(values)

    return structure


def _is_dtype(kind: Any) -> bool:
    # Torch takes seconds to load. Whoever has a value with a dtype has loaded it.
    torch = sys.modules.get("torch")
    return torch is not None and kind is torch.dtype


def _read_dtype(name: Any, kind: type) -> torch.dtype:
    dtype = getattr(sys.modules["torch"], name, None) if isinstance(name, str) else None
    if not isinstance(dtype, kind):
        raise TypeError(f"expected a dtype, found {_quote(name)}")
    return cast("torch.dtype", dtype)


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
    converter.register_structure_hook_factory(_is_plain_union, _one_of_kinds)
    converter.register_structure_hook_factory(_is_sequence, _read_list)
    converter.register_structure_hook_factory(dataclasses.is_dataclass, _read_dataclass)
    converter.register_structure_hook_func(_is_dtype, _read_dtype)
    converter.register_unstructure_hook_func(_is_dtype, lambda dtype: str(dtype).removeprefix("torch."))
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
