"""Tap: the place of a site in a module tree.

It is written `path`, `path:input`, `path:output` or, of several, `path:input[1]`, `path:output[1]`. A bare path means
its output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minimax_tools.errors import TargetError

_NOTATION = re.compile(r"(?P<path>[\w.]*)(:(?P<point>input|output)(\[(?P<index>\d+)\])?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tap:
    """An input or output of a submodule."""

    path: str  # path of the submodule, as `named_modules` gives it; empty for the module itself
    point: str = "output"  # `input` or `output`
    index: int = 0  # index among several outputs, or among the inputs, keyword arguments last

    @classmethod
    def parse(cls, text: str) -> Tap:
        """Read the notation above.

        Raises:
            TargetError: The text is not of that form.
        """
        match = _NOTATION.fullmatch(text)
        if match is None:
            raise TargetError(
                f"the site {text!r} cannot be read",
                expected="'submodule.path', 'submodule.path:input' or 'submodule.path:output[1]'",
            )
        return cls(path=match["path"], point=match["point"] or "output", index=int(match["index"] or 0))

    def pick(self, value: Any) -> torch.Tensor | None:
        """Return the tapped tensor; None if there is no such tensor.

        `value` is a submodule's output as it was returned, or one tuple of its inputs, keyword arguments last.
        """
        elements = value if isinstance(value, (tuple, list)) else (value,)
        element = elements[self.index] if self.index < len(elements) else None
        return element if isinstance(element, torch.Tensor) else None

    def put(self, value: Any, tensor: torch.Tensor) -> Any:
        """Return `value` with the tapped element replaced, if `pick` gives one; a list comes back as a tuple."""
        if not isinstance(value, (tuple, list)):
            return tensor
        elements = list(value)
        elements[self.index] = tensor
        # A named tuple's fields may be read by name behind the submodule.
        return type(value)(*elements) if hasattr(value, "_fields") else tuple(elements)

    def __str__(self) -> str:
        return f"{self.path or '<layer>'}:{self.point}[{self.index}]"


def verify_taps(module: torch.nn.Module, taps: Mapping[Any, Tap]) -> None:
    """Raise if a tapped submodule does not exist.

    Raises:
        TargetError: Some do not exist; the message names all of them.
    """
    present = dict(module.named_modules())
    missing = [f"{site}: {tap.path!r}" for site, tap in taps.items() if tap.path not in present]
    if missing:
        raise TargetError(
            f"sites name submodules that {type(module).__name__} does not have",
            found=", ".join(missing),
            next_step="Paths are those of named_modules().",
        )
