"""DumpPiece: a tensor of another tool's dump, known by its file's name and header; Dump: all pieces of a directory.

SitePlace is the place of a site in a dump, in the notation of a map (`minimax_tools.model.site_layouts`):
`model.layers.{layer}.self_attn.qkv_proj:output[0][0:768]@shard(-1)`. The path may be the end of a module's path;
`{layer}` is the layer's number, and `{next}` the number of the layer behind it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from minimax_tools.dumps.schedule import PassRecord
from minimax_tools.dumps.tensor_file import list_tensors
from minimax_tools.errors import CaptureError, UsageError
from minimax_tools.model.site_layouts import PlaceNotation

# The first number is the layer's, whatever the list of layers is called; numbers of experts follow.
_FIRST_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_EXAMPLE = "'layers.{layer}.self_attn.qkv_proj:output[0][0:768]@shard(-1)', all but the path may be left out"
_LAYER, _NEXT = "{layer}", "{next}"
# Path before a place's own that leads into a layer: the place `norm` does not mean the module `layers.0.norm`.
_OTHER_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
# The input or output that is meant if a place does not say; the first of these that a module has.
_USUAL_ELEMENTS = ("", "0", "hidden_states", "0.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpPiece:
    """The tensor that one rank wrote of one module in one forward pass."""

    file: str  # path within the dump
    keys: tuple[str | int, ...]  # keys of the tensor in the file's value; empty if it is the value
    module: str  # path of the module, or the tensor's own name; empty for the model itself
    point: str  # `input` or `output`
    element: str  # which of several inputs or outputs: an index, a name, or empty if there is one
    step: str  # label of the forward pass
    rank: int  # tensor-parallel rank that wrote it
    shape: tuple[int, ...]
    dtype: str  # as in `bfloat16`
    # Names of its dims as the user gave them to the tool, such as `b s h[tp]`; else None.
    dims: str | None = None

    def __str__(self) -> str:
        element = f"[{self.element}]" if self.element else ""
        return f"{self.module}:{self.point}{element}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Contents of another tool's directory, known without reading the values of its modules."""

    directory: Path
    format: str  # name of the layout
    pieces: tuple[DumpPiece, ...]
    steps: tuple[str, ...]  # labels of its forward passes, in their order; the first prefill comes first
    num_ranks: int = 1  # ranks of one tensor-parallel group, as far as the dump tells
    # Whether the tokens of all prompts lie one after another, not in padded rows; None if either may be.
    is_packed: bool | None = None
    is_one_rank: bool = False  # whether the tool keeps rank 0's tensors alone, however many ranks there are
    # Whether the tool writes the inputs of all modules, so that the dump's last layer is the model's.
    is_whole_model: bool = False
    # Requests and positions of each pass; empty if the tool does not record them.
    records: tuple[PassRecord, ...] = ()
    notes: tuple[
        str, ...
    ] = ()  # sentences on what of the directory is left out, and on names that are changed


def list_pieces(
    path: Path,
    *,
    directory: Path,
    module: str,
    step: str,
    point: str = "output",
    element: str = "",
    rank: int = 0,
) -> Iterator[DumpPiece]:
    """Yield the pieces in the file `path` of the dump in `directory`, from its header; see `DumpPiece` for the rest.

    The keys of a tensor within a `.pt` file follow `element`: with the keys (0, "k"), `out` becomes `out.0.k`.
    """
    tensors = list_tensors(path)
    if not tensors:
        raise CaptureError(
            f"{path} holds no tensor",
            next_step="Copy it again from the host that wrote it; or remove it, and its site is not exposed.",
        )
    for tensor in tensors:
        element_keys = map(str, tensor.keys) if path.suffix == ".pt" else ()
        yield DumpPiece(
            file=path.relative_to(directory).as_posix(),
            keys=tensor.keys,
            module=module,
            point=point,
            element=".".join(part for part in (element, *element_keys) if part),
            step=step,
            rank=rank,
            shape=tensor.shape,
            dtype=tensor.dtype,
        )


def order_steps(pieces: Iterable[DumpPiece]) -> tuple[str, ...]:
    """Return the labels of the pieces' passes, such as `0`, `0.1`, `1`, in the order of their numbers."""
    return tuple(sorted({piece.step for piece in pieces}, key=step_order))


def step_order(label: str) -> tuple[int, ...]:
    """Return the numbers of a pass's label, by which labels are sorted: (3, 1) for `3.1`."""
    return tuple(int(part) for part in label.split("."))


def find_layer(module: str) -> int | None:
    """Return the number of a module's layer; None if its name has no number."""
    match = _FIRST_NUMBER.search(module)
    return None if match is None else int(match[0])


def word_module(module: str) -> str:
    """Return a module's name as a map writes it, such as `blocks.{layer}.attn.wq`."""
    return _FIRST_NUMBER.sub("{layer}", module, count=1)


def word_modules(modules: Iterable[str]) -> list[str]:
    """Return modules' names as a map writes them, each once."""
    return list(dict.fromkeys(word_module(module) for module in modules))


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePlace(PlaceNotation):
    """The place of a site; its path is a module's, or the end of one, and may hold `{layer}` or `{next}`."""

    @classmethod
    def read(cls, text: str) -> SitePlace:
        """Read a place; raise UsageError if it cannot be read."""
        notation = PlaceNotation.parse(text, example=_EXAMPLE)
        if text.count(_LAYER) + text.count(_NEXT) > 1:
            raise UsageError(f"the place {text!r} cannot be read", expected=_EXAMPLE)
        return cls(**{part.name: getattr(notation, part.name) for part in fields(notation)})

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
        """Cut the part out of one rank's tensor; `what` names the tensor in messages."""
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
