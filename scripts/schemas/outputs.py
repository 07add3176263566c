"""Outputs: the schema of every JSON output, by the name of its file in docs/schema; `outputs.yaml` says their keys."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from minimax_tools.printable import SCHEMA_VERSION
from schemas.fields import (
    ANY,
    FLAG,
    INTEGER,
    NUMBER,
    TEXT,
    WHOLE,
    Schema,
    described,
    fixed_list,
    maybe,
    record,
    schema_of,
)

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {
    "text": TEXT,
    "flag": FLAG,
    "whole": WHOLE,
    "integer": INTEGER,
    "float": {"type": "number"},
    "number": NUMBER,
    "any": ANY,
}
_VERSION = {"const": SCHEMA_VERSION, "description": "Version of all JSON outputs."}
_NEXT = described(
    {"type": "array", "items": TEXT},
    "Complete commands to run next, best first; empty if nothing remains to be done.",
)


def build_schemas() -> dict[str, Schema]:
    """Return the schema of every JSON output by name, each complete with its version and the next commands."""
    file = _File(yaml.safe_load(Path(__file__).with_name("outputs.yaml").read_text("utf-8")))
    return {name: _complete(name, file.named(name)) for name in file.outputs}


def _complete(name: str, output: Schema) -> Schema:
    optional = [key for key in output["properties"] if key not in output["required"]]
    properties = {"schema_version": _VERSION, **output["properties"], "next": _NEXT}
    whole = described(record(properties, optional=optional), output["description"])
    return {"$schema": _DRAFT, "title": name, **whole}


class _File:
    """The declarations of `outputs.yaml`, whose head says how to read them."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.outputs: Mapping[str, Any] = content["outputs"]
        self._declared = {**content["records"], **self.outputs}
        self._classes = {
            name: getattr(importlib.import_module(module), name)
            for module, names in content["classes"].items()
            for name in names.split(", ")
        }

    def named(self, name: str) -> Schema:
        """Return the schema of a type, a class, a field of one, a record or an output."""
        if name in _PLAIN:
            return _PLAIN[name]
        kind, _, field = name.partition(".")
        if kind in self._classes:
            schema = schema_of(self._classes[kind])
            found: Schema = schema["properties"][field] if field else schema
            return found
        return self._read(self._declared[name])

    def _read(self, declared: Any) -> Schema:
        if isinstance(declared, str):
            kind, _, description = declared.partition(" | ")
            return described(self._type(kind), description)
        if "of" in declared and len(declared) == 2:
            item, (form, description) = self._read(declared["of"]), next(iter(declared.items()))
            forms = {
                "maybe": maybe(item),
                "list": {"type": "array", "items": item},
                "map": {"type": "object", "additionalProperties": item},
            }
            return described(forms[form], description)
        return self._record(declared)

    def _type(self, kind: str) -> Schema:
        if kind.endswith("?"):
            return maybe(self._type(kind[:-1]))
        if kind.startswith("["):
            return {"type": "array", "items": self._type(kind[1:-1])}
        if kind.startswith("{"):
            return {"type": "object", "additionalProperties": self._type(kind[1:-1])}
        if kind.startswith("one of "):
            return {"enum": kind.removeprefix("one of ").split(", ")}
        if kind.startswith("pair of "):
            return fixed_list([self._type(one) for one in kind.removeprefix("pair of ").split(", ")])
        if kind.startswith("const "):
            return {"const": json.loads(kind.removeprefix("const "))}
        return self.named(kind)

    def _record(self, declared: Mapping[str, Any]) -> Schema:
        properties: dict[str, Schema] = {}
        description, optional = "", set(_names(declared.get("optional")))
        for key, value in declared.items():
            if key == "about":
                description = value
            elif key in ("like", "may be"):
                for name in _names(value):
                    other = self.named(name)
                    properties |= other["properties"]
                    required = other["required"] if key == "like" else ()
                    optional |= {key for key in other["properties"] if key not in required}
                    description = description or other.get("description", "")
            elif key not in ("without", "optional"):
                name = key.removesuffix("?")
                optional |= {name} if key.endswith("?") else set()
                own = properties.get(name, {}).get("description", "")
                properties[name] = described(self._read(value), own)
        for name in _names(declared.get("without")):
            if name not in properties:
                raise ValueError(f"{description or declared}: there is no key {name} to be without")
            del properties[name]
        return described(record(properties, optional=sorted(optional)), description)


def _names(text: str | None) -> list[str]:
    return text.split(", ") if text else []
