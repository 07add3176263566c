"""YAML that a user wrote, read as plain values or as nodes; bounded in depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from minimax_tools.errors import UsageError

# Files of mm2's own nest 4 deep.
_MAX_DEPTH = 64
# libyaml's loader is several times as fast; PyYAML may have been built without it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> Any:
    """Read the value of a YAML file: dicts, lists, strings, numbers, booleans, None, or what else YAML has, as dates.

    Raises:
        UsageError: As of `compose_yaml`; or it names a key twice, or holds no such value, as the date 2026-99-99.
    """
    root = compose_yaml(path)
    if root is None:
        return None
    repeated_key = _find_repeated_key(root)
    if repeated_key is not None:
        raise UsageError(
            f"{path} names {repeated_key.value!r} twice",
            found=f"the second in line {repeated_key.start_mark.line + 1}",
            next_step="Remove one of them.",
        )
    loader = _LOADER("")
    try:
        return loader.construct_document(root)
    except (yaml.YAMLError, ValueError) as error:
        raise _not_yaml(path, error) from error
    finally:
        loader.dispose()


def compose_yaml(path: Path) -> yaml.Node | None:
    """Read the nodes of a YAML file, which know their lines; None if the file is empty.

    Raises:
        UsageError: The file cannot be read, is not YAML, nests deeper than 64, or uses aliases.
    """
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_depth_and_aliases(text)
        root: yaml.Node | None = yaml.compose(text, Loader=_LOADER)
        return root
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read", found=getattr(error, "strerror", None) or str(error)
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise _not_yaml(path, error) from error


def _refuse_depth_and_aliases(text: str) -> None:
    """Raise a YAMLError for text on which the loaders' recursion could end the process, or run in a circle."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem=f"the alias *{event.anchor}, which mm2 does not read", problem_mark=event.start_mark
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"values nested more than {_MAX_DEPTH} deep", problem_mark=event.start_mark
            )


def _find_repeated_key(node: Any) -> Any:
    """Return the first key that a mapping repeats; None without one."""
    if not isinstance(node, yaml.CollectionNode):
        return None
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
        repeated_key = _find_repeated_key(child)
        if repeated_key is not None:
            return repeated_key
    return None


def _not_yaml(path: Path, error: Exception) -> UsageError:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return UsageError(f"{path} is not valid YAML", found=f"{where}{problem or error}")
