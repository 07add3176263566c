"""A YAML file that a user wrote, read as plain values. A repeated key is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from minimax_tools.errors import UsageError


def read_yaml(path: Path) -> Any:
    """Read the value of a YAML file: dicts, lists, strings, numbers, booleans and None.

    Raises:
        UsageError: The file cannot be read, is not YAML, or names a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        twice = _find_twice(yaml.compose(text, Loader=yaml.SafeLoader), seen=set())
        value = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read", found=getattr(error, "strerror", None) or str(error)
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no YAML that can be read", found=_describe(error)) from error
    if twice is not None:
        raise UsageError(
            f"{path} names {twice.value!r} twice",
            found=f"the second in line {twice.start_mark.line + 1}",
            next_step="Remove one of them.",
        )
    return value


def _find_twice(node: Any, *, seen: set[int]) -> Any:
    """Return the first key that a mapping repeats; None without one."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return None
    seen.add(id(node))
    inner = node.value
    if isinstance(node, yaml.MappingNode):
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for index, key in enumerate(keys):
            if (key.tag, key.value) in [(other.tag, other.value) for other in keys[:index]]:
                return key
        inner = [value for _, value in node.value]
    found = (_find_twice(value, seen=seen) for value in inner)
    return next((twice for twice in found if twice is not None), None)


def _describe(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{problem or error}"
