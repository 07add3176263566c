"""ProjectDefaults: the defaults of a project, in the file `mm2.toml` of the working directory or of a folder above it.

    model = "MiniMaxAI/MiniMax-M2"
    golden = "captures/full_model"        # paths count from the file's folder
    target = "ports/my_port.py:DecoderLayer"
    backend = "xla-cpu"
    tp_degree = 2

A key is the name of an option. The command line goes before the environment, and both before the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from click.core import ParameterSource

from minimax_tools.errors import UsageError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "mm2.toml"
# A folder or a hub id; a file's path and a name in it, as --target takes them; a path; other text; a whole number.
# Or one of the named criteria or a file of them.
_MODEL, _PORT, _PATH, _TEXT, _COUNT, _CRITERIA = "model", "port", "path", "text", "count", "criteria"
_KINDS = {
    "model": _MODEL,
    "golden": _PATH,
    "captures": _PATH,
    "target": _PORT,
    "backend": _TEXT,
    "compile": _TEXT,
    "dtype": _TEXT,
    "tp_degree": _COUNT,
    "ep_degree": _COUNT,
    "reduce_dtype": _TEXT,
    "device_map": _TEXT,
    "max_memory": _TEXT,
    "memory_budget": _TEXT,
    "attn_implementation": _TEXT,
    "experts_implementation": _TEXT,
    "layer_timeout": _COUNT,
    "criteria": _CRITERIA,
}
# Parameters of the commands that have another name than their option.
_PARAMETERS = {"compile": "compile_with", "criteria": "criteria_name"}
_REMOTE = "://"
_MOST_FOLDERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectDefaults:
    """The defaults of one file, or none."""

    path: Path | None = None  # the file; None without one
    values: Mapping[str, str | int] = field(default_factory=dict)  # by the parameter's name

    @classmethod
    def find(cls, folder: Path) -> ProjectDefaults:
        """Read the file of `folder`, or of the nearest folder above it that has one.

        Raises:
            UsageError: The file cannot be read, or holds a key or a value that no option takes.
        """
        for place in (folder, *folder.parents)[:_MOST_FOLDERS]:
            path = place / FILE_NAME
            if path.is_file():
                return cls.read(path)
        return cls()

    @classmethod
    def read(cls, path: Path) -> ProjectDefaults:
        """Read a file.

        Raises:
            UsageError: It cannot be read, or holds a key or a value that no option takes.
        """
        try:
            record = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path} cannot be read", found=str(error), next_step="Correct it: it is a TOML file."
            ) from error
        values = {_PARAMETERS.get(key, key): _read_value(path, key, value) for key, value in record.items()}
        return cls(path=path, values=MappingProxyType(values))

    def used_by(self, context: click.Context) -> str:
        """Return the options that a command takes from the file, as text; empty if it takes none."""
        return self._word(
            context, lambda name: context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
        )

    def offered_to(self, context: click.Context) -> str:
        """Return the options of a command that the file gives a default, as text; empty if it gives none."""
        return self._word(context, lambda _: True)

    def _word(self, context: click.Context, counts: Callable[[str], bool]) -> str:
        given = (
            f"{param.opts[0]} {self.values[param.name]}"
            for param in context.command.params
            if param.name is not None and param.name in self.values and counts(param.name)
        )
        return ", ".join(given)


def _read_value(path: Path, key: str, value: Any) -> str | int:
    kind = _KINDS.get(key)
    if kind is None:
        near = did_you_mean(key.replace("-", "_"), _KINDS)
        raise UsageError(
            f"{path}: no default is called {key!r}",
            expected=f"one of {', '.join(_KINDS)}",
            next_step=near or None,
        )
    if kind == _COUNT:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise UsageError(f"{path}: {key} is wrong", expected="a whole number", found=repr(value))
    if not isinstance(value, str) or not value:
        raise UsageError(f"{path}: {key} is wrong", expected="a text in quotes", found=repr(value))
    return _place(path.parent, value, kind=kind)


def _place(folder: Path, text: str, *, kind: str) -> str:
    """Return a value whose path counts from the file's folder as one that counts from the working directory."""
    if kind == _TEXT or _REMOTE in text:
        return text
    file, colon, name = text.partition(":")
    if kind == _CRITERIA and not text.endswith((".yaml", ".yml")):
        return text
    if kind == _PORT and not file.endswith(".py"):
        return text  # a module of Python, or a word such as builtin
    if kind == _MODEL and not (folder / text).is_dir():
        return text  # a hub id
    path = folder / Path(file if kind == _PORT else text).expanduser()
    near = Path(os.path.relpath(path))
    # A path through many folders above is easier to read from the root.
    shown = _without_parents(path) if ".." in near.parts else near
    return f"{shown}{colon}{name}" if kind == _PORT else str(shown)


def _without_parents(path: Path) -> Path:
    """Return a path without `..`, unless a symbolic link on the way leads elsewhere."""
    plain = Path(os.path.normpath(path))
    return plain if plain.resolve() == path.resolve() else path
