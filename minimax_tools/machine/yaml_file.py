"""A YAML file that a user wrote, read as plain values. A repeated key is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from minimax_tools.errors import UsageError


def read_yaml(path: Path) -> Any:
    """Read the value of a YAML file: dicts, lists, strings, numbers, booleans, None, or what else YAML has, as dates.

    Raises:
        UsageError: The file cannot be read, is not YAML, or names a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        repeated_key = _find_repeated_key(yaml.compose(text, Loader=yaml.SafeLoader), visited=set())
        value = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read", found=getattr(error, "strerror", None) or str(error)
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid YAML", found=_describe(error)) from error
    if repeated_key is not None:
        raise UsageError(
            f"{path} names {repeated_key.value!r} twice",
            found=f"the second in line {repeated_key.start_mark.line + 1}",
            next_step="Remove one of them.",
        )
    return value


def _find_repeated_key(node: Any, *, visited: set[int]) -> Any:
    """Return the first key that a mapping repeats; None without one."""
    # An alias of YAML may lead to a node that was visited, or in a circle.
    if id(node) in visited or not isinstance(node, yaml.CollectionNode):
        return None
    visited.add(id(node))
    children = node.value
    if isinstance(node, yaml.MappingNode):
        children = [value for _, value in node.value]
        key_texts: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                # The tag tells the number 1 from the text "1".
                if (key.tag, key.value) in key_texts:
                    return key
                key_texts.add((key.tag, key.value))
    for child in children:
        repeated_key = _find_repeated_key(child, visited=visited)
        if repeated_key is not None:
            return repeated_key
    return None


def _describe(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{problem or error}"
