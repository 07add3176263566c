"""Parts of schemas: text, numbers, lists, and objects that are closed unless their keys are data."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def text(description: str = "") -> Schema:
    """Return the schema of a text."""
    return _described({"type": "string"}, description)


def whole(description: str = "", *, least: int | None = 0) -> Schema:
    """Return the schema of a whole number; `least` is None if it may be negative."""
    return _described({"type": "integer", **({} if least is None else {"minimum": least})}, description)


def number(description: str = "") -> Schema:
    """Return the schema of a figure: null stands for NaN, and the texts "inf" and "-inf" for infinities."""
    return _described({"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", None]}]}, description)


def flag(description: str = "") -> Schema:
    """Return the schema of true or false."""
    return _described({"type": "boolean"}, description)


def choice(*values: str, description: str = "") -> Schema:
    """Return the schema of one of several texts."""
    return _described({"enum": list(values)}, description)


def maybe(schema: Schema, description: str = "") -> Schema:
    """Return a schema that also admits null."""
    inner = {key: value for key, value in schema.items() if key != "description"}
    told = description or schema.get("description", "")
    return _described({"anyOf": [inner, {"type": "null"}]}, told)


def listed(item: Schema, description: str = "") -> Schema:
    """Return the schema of a list."""
    return _described({"type": "array", "items": item}, description)


def by_name(value: Schema, description: str = "") -> Schema:
    """Return the schema of an object whose keys are data: names, or numbers as text."""
    return _described({"type": "object", "additionalProperties": value}, description)


def anything(description: str = "") -> Schema:
    """Return the schema of any plain value: text, a number, true or false, null, or a list of these."""
    plain = {"type": ["string", "number", "boolean", "null"]}
    return _described({"anyOf": [plain, {"type": "array"}, {"type": "object"}]}, description)


def record(properties: dict[str, Schema], description: str = "", *, optional: tuple[str, ...] = ()) -> Schema:
    """Return the schema of a closed object, whose keys are all required but the optional ones."""
    return _described(
        {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name not in optional],
            "additionalProperties": False,
        },
        description,
    )


def merged(description: str, *records: Schema, optional: tuple[Schema, ...] = ()) -> Schema:
    """Return the schema of one object that has the keys of several records; those of `optional` may be absent."""
    properties: dict[str, Schema] = {}
    for one in (*records, *optional):
        properties |= one["properties"]
    required = [name for one in records for name in one["required"]]
    may_be_absent = tuple(name for name in properties if name not in required)
    return record(properties, description, optional=may_be_absent)


def retold(schema: Schema, description: str) -> Schema:
    """Return a schema with another description."""
    return {
        "description": description,
        **{key: value for key, value in schema.items() if key != "description"},
    }


def _described(schema: Schema, description: str) -> Schema:
    return {"description": description, **schema} if description else schema
