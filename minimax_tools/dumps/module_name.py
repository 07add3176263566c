"""Module names: a port's own, with `{layer}` where the layer's number stands."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Whatever the list of layers is called: numbers of experts come behind.
_FIRST_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def find_layer(module: str) -> int | None:
    """The number of the layer that a module belongs to; None where its name has no number."""
    match = _FIRST_NUMBER.search(module)
    return None if match is None else int(match[0])


def word_module(module: str) -> str:
    """A module's name as a map has it, such as `blocks.{layer}.attn.wq`."""
    return _FIRST_NUMBER.sub("{layer}", module, count=1)


def word_modules(modules: Iterable[str]) -> list[str]:
    """Modules' names, those that differ in their layer's number alone as one."""
    return list(dict.fromkeys(word_module(module) for module in modules))
