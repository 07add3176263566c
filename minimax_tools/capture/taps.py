"""Tap: the place of a site in a module tree.

It is written `path`, `path:input`, `path:output` or, of several, `path:input[1]`, `path:output[1]`. A bare path means
its output. A cut along the last dim may follow, `path:output[0][0:512]`: so a fused projection shows its parts.
The notation is that of `minimax_tools.model.site_layouts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minimax_tools.errors import TargetError, UsageError
from minimax_tools.model.site_layouts import PlaceNotation

_PATH = re.compile(r"[\w.]*")
SITE_FORMS = (
    "'submodule.path', 'submodule.path:input', 'submodule.path:output[1]', "
    "or a cut along the last dim, 'submodule.path:output[0][0:512]'"
)
# Makes what is kept of a tensor.
Keep = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tap:
    """An input or output of a submodule."""

    path: str  # path of the submodule, as `named_modules` gives it; empty for the module itself
    point: str = "output"  # `input` or `output`
    index: int = 0  # index among several outputs, or among the inputs, keyword arguments last

    part: tuple[int, int] | None = None  # start and stop along the tensor's last dim; None for all of it

    @classmethod
    def parse(cls, text: str) -> Tap:
        """Read the notation above; a layout of ranks behind it is no part of a tap.

        Raises:
            TargetError: The text is not of that form.
        """
        try:
            return cls.of(PlaceNotation.parse(text, example=SITE_FORMS), text=text)
        except UsageError as error:
            raise TargetError(
                f"the site {text!r} cannot be read", expected=error.expected or error.what
            ) from error

    @classmethod
    def of(cls, notation: PlaceNotation, *, text: str) -> Tap:
        """Return the tap of a place, named `text` in errors; raise TargetError if no submodule has such a path."""
        element = notation.element or "0"
        if _PATH.fullmatch(notation.path) is None or not element.isdecimal():
            raise TargetError(f"the site {text!r} cannot be read", expected=SITE_FORMS)
        return cls(path=notation.path, point=notation.point, index=int(element), part=notation.part)

    def pick(self, value: Any) -> torch.Tensor | None:
        """Return the tapped tensor; None if there is no such tensor.

        `value` is a submodule's output as it was returned, or one tuple of its inputs, keyword arguments last.
        """
        elements = value if isinstance(value, (tuple, list)) else (value,)
        element = elements[self.index] if self.index < len(elements) else None
        if not isinstance(element, torch.Tensor):
            return None
        return element if self.part is None else element[self._place(element)]

    def put(self, value: Any, tensor: torch.Tensor) -> Any:
        """Return `value` with the tapped element replaced, if `pick` gives one; a list comes back as a tuple."""
        is_lone = not isinstance(value, (tuple, list))
        elements = [value] if is_lone else list(value)
        if self.part is not None:
            whole = elements[self.index].clone()
            whole[self._place(whole)] = tensor
            tensor = whole
        if is_lone:
            return tensor
        elements[self.index] = tensor
        # A named tuple's fields may be read by name behind the submodule.
        return type(value)(*elements) if hasattr(value, "_fields") else tuple(elements)

    def __str__(self) -> str:
        part = "" if self.part is None else f"[{self.part[0]}:{self.part[1]}]"
        return f"{self.path or '<layer>'}:{self.point}[{self.index}]{part}"

    def _place(self, tensor: torch.Tensor) -> tuple[Any, slice]:
        """Return the index of the cut in a tensor."""
        assert self.part is not None, "only a cut has a place"
        start, stop = self.part
        if tensor.ndim == 0 or tensor.shape[-1] < stop:
            raise TargetError(
                f"the site {self} cannot be cut",
                expected=f"at least {stop} along the last dim",
                found=str(list(tensor.shape)),
                next_step="Correct the part in the port's `sites`; on several ranks it counts on each rank.",
            )
        return ..., slice(start, stop)


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
