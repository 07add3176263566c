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
from schemas.parts import Schema, anything, by_name, flag, listed, maybe, number, record, retold, text, whole

# Values that are written in a form of their own.
_SPECIAL: dict[Any, Schema] = {
    str: text(),
    int: whole(least=None),
    float: number(),
    bool: flag(),
    Path: text(),
    torch.dtype: text("Name of a dtype, such as bfloat16."),
    Any: anything(),
    object: anything(),
    range: {"description": "First layer, and the layer after the last.", **listed(whole())},
    Span: record({"start": whole("First layer."), "stop": whole("The layer after the last.")}),
}


def schema_of(kind: Any, *, without: Sequence[str] = (), **replaced: Schema) -> Schema:
    """Return the schema of a value by its type.

    Args:
        kind: A type hint: a dataclass, an enum, a plain type, a tuple, a mapping, or a union with None.
        without: Fields of a dataclass that are left out.
        replaced: Schemas of fields that are written otherwise than their type says, or of further keys.
    """
    if kind in _SPECIAL:
        return _SPECIAL[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return _fixed_list(arguments)
    if origin in (tuple, list, Sequence, frozenset):
        return listed(schema_of(arguments[0]))
    if origin in (Mapping, dict):
        return by_name(schema_of(arguments[1]))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, without=without, replaced=replaced)
    raise TypeError(f"no schema of {kind}")


def _union(kinds: Sequence[Any]) -> Schema:
    known = [schema_of(kind) for kind in kinds if kind is not type(None)]
    schema = known[0] if len(known) == 1 else {"anyOf": known}
    return maybe(schema) if type(None) in kinds else schema


def _fixed_list(kinds: Sequence[Any]) -> Schema:
    return {
        "type": "array",
        "prefixItems": [schema_of(kind) for kind in kinds],
        "items": False,
        "minItems": len(kinds),
    }


def _dataclass(kind: type, *, without: Sequence[str], replaced: dict[str, Schema]) -> Schema:
    hints, comments = typing.get_type_hints(kind), field_comments(kind)
    properties = {}
    for field in fields(kind):
        if field.name in without:
            continue
        schema = replaced.get(field.name) or schema_of(hints[field.name])
        comment = comments.get(field.name, "")
        properties[field.name] = retold(schema, comment) if comment else schema
    properties |= {name: schema for name, schema in replaced.items() if name not in properties}
    description = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
    return record(properties, description)


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
