"""SitePlace: the place of a site in another tool's dump, in the notation of a map.

    model.layers.{layer}.self_attn.qkv_proj:output[0][0:768]@shard(-1)

The notation is that of `minimax_tools.model.place_notation`. The path may be the end of a module's path. In it,
`{layer}` is the layer's number, and `{next}` the number of the layer behind it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from minimax_tools.dumps.piece import DumpPiece
from minimax_tools.errors import CaptureError, UsageError
from minimax_tools.model.place_notation import PlaceNotation
from minimax_tools.model.site_layouts import SiteLayout

_EXAMPLE = "'layers.{layer}.self_attn.qkv_proj:output[0][0:768]@shard(-1)', all but the path may be left out"
_LAYER, _NEXT = "{layer}", "{next}"
# Path before a place's own that leads into a layer: the place `norm` does not mean the module `layers.0.norm`.
_OTHER_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
# The input or output that is meant if a place does not say; the first of these that a module has.
_USUAL_ELEMENTS = ("", "0", "hidden_states", "0.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePlace:
    """The place of a site."""

    path: str  # the module's path or its end, with `{layer}` or `{next}` if there is one for each layer
    point: str = "output"  # `input` or `output`
    element: str | None = None  # index or name among several; None for the only one or the first
    # Start and stop along the last dim of each rank's tensor; None for all of it.
    part: tuple[int, int] | None = None
    layout: SiteLayout | None = None  # layout of the ranks' pieces; None if the map does not say

    @classmethod
    def parse(cls, text: str) -> SitePlace:
        """Read a place.

        Raises:
            UsageError: The text cannot be read.
        """
        notation = PlaceNotation.parse(text, example=_EXAMPLE)
        if text.count(_LAYER) + text.count(_NEXT) > 1:
            raise UsageError(f"the place {text!r} cannot be read", expected=_EXAMPLE)
        return cls(
            path=notation.path,
            point=notation.point,
            element=notation.element,
            part=notation.part,
            layout=notation.layout,
        )

    def find_layers(self, modules: Iterable[str]) -> dict[int | None, str]:
        """Return, of `modules`, those that fit the path, by layer; by None if the path names no layer.

        For the path `norm`, the module `norm` goes before `model.norm`, of which only the end fits.

        Raises:
            CaptureError: The ends of two modules fit for one layer.
        """
        pattern = self._pattern()
        whole: dict[int | None, str] = {}  # modules whose whole path fits
        by_end: dict[int | None, list[str]] = defaultdict(list)  # modules of which only the end fits
        for module in modules:
            match = pattern.fullmatch(module)
            if match is None or _OTHER_LAYER.search(match["prefix"]):
                continue
            numbers = match.groupdict()
            layer = None
            if numbers.get("layer") is not None:
                layer = int(numbers["layer"])
            elif numbers.get("next") is not None:
                layer = int(numbers["next"]) - 1
            if match["prefix"]:
                by_end[layer].append(module)
            else:
                whole[layer] = module
        for layer, fitting in by_end.items():
            if layer not in whole and len(fitting) > 1:
                raise CaptureError(
                    f"the place {self} means two modules",
                    found=f"{fitting[0]} and {fitting[1]}",
                    next_step="Name more of the path in the map.",
                )
        found = {**{layer: fitting[0] for layer, fitting in by_end.items()}, **whole}
        # `{next}` of layer 0 would be the input of layer 0 as the output of layer -1, which is none.
        return {layer: module for layer, module in found.items() if layer is None or layer >= 0}

    def choose(self, pieces: Iterable[DumpPiece]) -> tuple[DumpPiece, ...]:
        """Return the pieces of one module that the place means: one for each rank and pass."""
        at_point = [piece for piece in pieces if piece.point == self.point]
        wanted = [self.element] if self.element is not None else list(_USUAL_ELEMENTS)
        if self.element == "0":
            wanted.append("")  # a tool may not number the only one
        for element in wanted:
            chosen = tuple(piece for piece in at_point if piece.element == element)
            if chosen:
                return chosen
        return ()

    def cut(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        """Cut the part out of one rank's tensor; `what` names the tensor in messages.

        Raises:
            CaptureError: The tensor is too narrow.
        """
        if self.part is None:
            return tensor
        start, stop = self.part
        if tensor.ndim == 0 or tensor.shape[-1] < stop:
            raise CaptureError(
                f"{what} cannot be cut as the map says",
                expected=f"at least {stop} along the last dim of every rank's tensor",
                found=str(list(tensor.shape)),
                next_step="Correct the part in the map; it counts on each rank, before ranks are put together.",
            )
        return tensor[..., start:stop]

    def _pattern(self) -> re.Pattern[str]:
        body = re.escape(self.path)
        body = body.replace(re.escape(_LAYER), r"(?P<layer>\d+)").replace(re.escape(_NEXT), r"(?P<next>\d+)")
        # An empty path means the model itself, not the end of every module's path.
        return re.compile(rf"(?P<prefix>(?:.+\.)?){body}" if self.path else r"(?P<prefix>)")

    def __str__(self) -> str:
        element = "" if self.element is None else f"[{self.element}]"
        part = "" if self.part is None else f"[{self.part[0]}:{self.part[1]}]"
        return f"{self.path}:{self.point}{element}{part}{self.layout or ''}"
