"""Schemas of dataclasses as the commands print them; the comments of the fields are the descriptions."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import textwrap
import tokenize
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from minimax_tools.model.span import Span

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
INTEGER: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
# Null stands for NaN, the texts for infinities.
NUMBER: Schema = {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", None]}]}
ANY: Schema = {
    "anyOf": [{"type": ["string", "number", "boolean", "null"]}, {"type": "array"}, {"type": "object"}]
}
_NULL: Schema = {"type": "null"}


def described(schema: Schema, description: str) -> Schema:
    """Return a schema with a description; with its own if this one is empty."""
    if not description:
        return schema
    return {"description": description} | {
        key: value for key, value in schema.items() if key != "description"
    }


def maybe(schema: Schema) -> Schema:
    """Return a schema that also admits null."""
    inner = {key: value for key, value in schema.items() if key != "description"}
    return described({"anyOf": [inner, _NULL]}, schema.get("description", ""))


def record(properties: Mapping[str, Schema], *, optional: Sequence[str] = ()) -> Schema:
    """Return the schema of a closed object, whose keys are all required but the optional ones."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


# Values that are written in a form of their own.
_SPECIAL: dict[Any, Schema] = {
    str: TEXT,
    int: INTEGER,
    float: NUMBER,
    bool: FLAG,
    Path: TEXT,
    torch.dtype: described(TEXT, "Name of a dtype, such as bfloat16."),
    Any: ANY,
    object: ANY,
    range: described({"type": "array", "items": WHOLE}, "First layer, and the layer after the last."),
    Span: record(
        {
            "start": described(WHOLE, "First layer."),
            "stop": described(WHOLE, "The layer after the last."),
        }
    ),
}


def schema_of(kind: Any) -> Schema:
    """Return the schema of a type hint: a dataclass, an enum, a plain type, a list, a mapping, or a union with None."""
    if kind in _SPECIAL:
        return _SPECIAL[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        known = [schema_of(one) for one in arguments if one is not type(None)]
        schema = known[0] if len(known) == 1 else {"anyOf": known}
        return maybe(schema) if type(None) in arguments else schema
    if origin is tuple and arguments[1:] != (Ellipsis,):
        return fixed_list([schema_of(one) for one in arguments])
    if origin in (tuple, list, Sequence, frozenset):
        return {"type": "array", "items": schema_of(arguments[0])}
    if origin in (Mapping, dict):
        return {"type": "object", "additionalProperties": schema_of(arguments[1])}
    if issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise TypeError(f"no schema of {kind}")
    hints, comments = typing.get_type_hints(kind), field_comments(kind)
    properties = {
        field.name: described(schema_of(hints[field.name]), comments.get(field.name, ""))
        for field in fields(kind)
    }
    return described(record(properties), (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " "))


def fixed_list(items: Sequence[Schema]) -> Schema:
    """Return the schema of a list of so many items."""
    return {"type": "array", "prefixItems": list(items), "items": False, "minItems": len(items)}


@functools.cache
def field_comments(kind: type) -> dict[str, str]:
    """Return the comment of each field of a dataclass: beside it, or on the lines above it."""
    source = textwrap.dedent(inspect.getsource(kind))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    above, beside = _comments_by_line(source)
    found: dict[str, str] = {}
    for base in kind.__mro__[1:]:
        if is_dataclass(base):
            found = {**field_comments(base), **found}
    for node in definition.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        first = node.lineno
        while first - 1 in above:
            first -= 1
        assert node.end_lineno is not None
        lines = [above[line] for line in range(first, node.lineno)]
        lines += [beside[line] for line in range(node.lineno, node.end_lineno + 1) if line in beside]
        if lines:
            found[node.target.id] = _as_sentence(" ".join(lines))
    return found


def _comments_by_line(source: str) -> tuple[dict[int, str], dict[int, str]]:
    """Return the comments that have a line for themselves, and those beside code, by line number."""
    above: dict[int, str] = {}
    beside: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line.lstrip().startswith("#")
            (above if is_alone else beside)[token.start[0]] = token.string.lstrip("# ").strip()
    return above, beside


def _as_sentence(comment: str) -> str:
    sentence = comment[:1].upper() + comment[1:]
    return sentence.replace("None", "null") + ("" if sentence.endswith(".") else ".")
