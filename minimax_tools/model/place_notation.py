"""PlaceNotation: the place of a site as a text names it, in a port's `sites` and in the map of a dump.

    model.layers.{layer}.self_attn.qkv_proj:output[0][0:768]@shard(-1)

| part | meaning |
|---|---|
| path | a module's path; all behind it may be left out |
| `:input`, `:output` | the module's input, or its output (the default) |
| `[0]`, `[name]` | which of several inputs or outputs |
| `[start:stop]` | cut of each rank's tensor along its last dim, before ranks are put together |
| `@shard(-1)` | layout of the ranks' pieces (`site_layouts`) |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from minimax_tools.errors import TargetError, UsageError
from minimax_tools.model.site_layouts import SiteLayout, parse_layout

_NOTATION = re.compile(
    r"(?P<path>[^:@\[\]]*)"
    r"(:(?P<point>input|output)(\[(?P<element>[^\]:]+)\])?)?"
    r"(\[(?P<start>\d+):(?P<stop>\d+)\])?"
    r"(@(?P<layout>.+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceNotation:
    """The parts of such a text."""

    path: str  # path of the module; empty for the module itself
    point: str = "output"  # `input` or `output`
    element: str | None = None  # index or name among several; None if the text does not say
    part: tuple[int, int] | None = None  # start and stop along the last dim; None for all of it
    layout: SiteLayout | None = None  # layout of the ranks' pieces; None if the text does not say

    @classmethod
    def parse(cls, text: str, *, example: str) -> PlaceNotation:
        """Read a text; `example` shows the errors' reader a right one.

        Raises:
            UsageError: The text cannot be read.
        """
        match = _NOTATION.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"the place {text!r} cannot be read", expected=example)
        part = (int(match["start"]), int(match["stop"])) if match["start"] else None
        if part is not None and part[0] >= part[1]:
            raise UsageError(f"the place {text!r} takes nothing: its part ends before it begins")
        try:
            layout = parse_layout(match["layout"]) if match["layout"] else None
        except TargetError as error:
            raise UsageError(
                f"the place {text!r} cannot be read: {error.what}", expected=error.expected
            ) from error
        return cls(
            path=match["path"].strip(),
            point=match["point"] or "output",
            element=match["element"],
            part=part,
            layout=layout,
        )
