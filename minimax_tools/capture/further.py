"""Further outputs: tensors of a port that are no sites, kept because the user asked for them. They are never judged.

    cache=:output[1]          what the layer returns second; an empty path is the layer itself
    gate=moe.gate_proj        all that a submodule returns
    mask=self_attn:input[1]   what a submodule is given, keyword arguments last
    cos=self_attn:input[cos]  the keyword argument of that name

Several tensors at a place, in tuples, lists or mappings, are NAME.0, NAME.1 or NAME.key. On several ranks a layout may
follow, `@shard(1)`; without one, pieces that differ are NAME.rank0, NAME.rank1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minimax_tools.capture.taps import Keep
from minimax_tools.errors import TargetError, UsageError, did_you_mean, list_names
from minimax_tools.model.site_layouts import PlaceNotation, are_equal_bits
from minimax_tools.model.sites import Site

# Key of a run's options in its manifest: the places, as the user wrote them.
ALSO = "also"
FURTHER_FORMS = "NAME=PATH, NAME=PATH:input[1] or, of the layer itself, NAME=:output[1]"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_MAX_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherPlace:
    """A place in a port's layer, and the name that its tensors get."""

    name: str
    place: PlaceNotation
    text: str  # the place as the user wrote it, with its name

    @classmethod
    def parse(cls, text: str) -> FurtherPlace:
        """Read `NAME=PLACE`.

        Raises:
            UsageError: The text is of another form, or the name is that of a site.
        """
        name, equals, place = text.partition("=")
        if not equals or _NAME.fullmatch(name) is None:
            raise UsageError(f"the further output {text!r} cannot be read", expected=FURTHER_FORMS)
        if name in set(Site):
            raise UsageError(
                f"the further output {text!r} has the name of a site",
                next_step="Choose another name. A port shows its sites by its attribute `sites`.",
            )
        notation = PlaceNotation.parse(place, example=FURTHER_FORMS)
        if notation.part is not None:
            start, stop = notation.part
            raise UsageError(
                f"the further output {text!r} cannot be cut: it is stored whole",
                next_step=f"Leave out [{start}:{stop}].",
            )
        return cls(name=name, place=notation, text=text)

    def pick(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return what is at the place, of several values some of which have names; None if nothing is."""
        element = self.place.element
        if element is None:
            named = {**{str(index): value for index, value in enumerate(args)}, **keywords}
            return named if len(named) > 1 else next(iter(named.values()), None)
        if not element.isdecimal():
            return keywords.get(element)
        several = (*args, *keywords.values())
        return several[int(element)] if int(element) < len(several) else None

    def join(self, pieces: Sequence[Mapping[str, torch.Tensor]], *, what: str) -> dict[str, torch.Tensor]:
        """Join the tensors that each rank kept at the place, in rank order and on the CPU."""
        joined: dict[str, torch.Tensor] = {}
        for name in dict.fromkeys(name for piece in pieces for name in piece):
            tensors = {rank: piece[name] for rank, piece in enumerate(pieces) if name in piece}
            first = next(iter(tensors.values()))
            is_on_all = len(tensors) == len(pieces)
            if len(pieces) > 1 and is_on_all and self.place.layout is not None:
                joined[name] = self.place.layout.assemble(list(tensors.values()), what=f"{what}, {name}")
            elif is_on_all and all(are_equal_bits(first, other) for other in tensors.values()):
                joined[name] = first
            else:
                joined |= {f"{name}.rank{rank}": tensor for rank, tensor in tensors.items()}
        return joined

    def __str__(self) -> str:
        return self.text


class FurtherRecorder:
    """Hooks that keep the tensors at further places of a layer for the time of a `with` block; `keep` copies a tensor.

    `tensors` are the copies by name, as far as the module has run since the block began, or since `start`.
    """

    def __init__(self, module: nn.Module, places: Sequence[FurtherPlace], *, keep: Keep) -> None:
        self._module = module
        self._places = tuple(places)
        self._keep = keep
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        """Forget the copies of an earlier run."""
        self.tensors = {}

    def __enter__(self) -> FurtherRecorder:
        for place in self._places:
            submodule = self._module.get_submodule(place.place.path)
            if place.place.point == "input":
                handle = submodule.register_forward_pre_hook(self._pre_hook(place), with_kwargs=True)
            else:
                handle = submodule.register_forward_hook(self._post_hook(place))
            self._handles.append(handle)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _pre_hook(self, place: FurtherPlace) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self._visit(place, args, keywords)

        return hook

    def _post_hook(self, place: FurtherPlace) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Mapping):
                self._visit(place, (), {str(key): value for key, value in output.items()})
            else:
                self._visit(place, output if isinstance(output, (tuple, list)) else (output,), {})

        return hook

    def _visit(self, place: FurtherPlace, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        for name, tensor in _named_tensors(place.name, place.pick(args, keywords)):
            self.tensors[name] = self._keep(tensor)


def parse_further(texts: Iterable[str]) -> tuple[FurtherPlace, ...]:
    """Read further places.

    Raises:
        UsageError: One cannot be read, or two have one name.
    """
    places = tuple(FurtherPlace.parse(text) for text in texts)
    names = [place.name for place in places]
    if len(set(names)) < len(names):
        raise UsageError(f"two further outputs have one name: {', '.join(map(str, places))}")
    return places


def verify_further(module: nn.Module, places: Sequence[FurtherPlace], *, what: str) -> None:
    """Raise if a layer lacks a submodule that a place names; `what` names the layer.

    Raises:
        TargetError: It does; the message suggests paths.
    """
    present = dict(module.named_modules())
    for place in places:
        path = place.place.path
        if path not in present:
            known = list_names([name for name in present if name], most=_MAX_NAMED)
            raise TargetError(
                f"{what} has no submodule {path!r}, which the further output {place} names",
                found=known or "no submodule",
                next_step=did_you_mean(path, present) or "Paths are those of named_modules().",
            )


def require_further(
    places: Sequence[FurtherPlace], tensors: Mapping[str, torch.Tensor], *, what: str
) -> None:
    """Raise if nothing passed at a place.

    Raises:
        TargetError: No tensor did.
    """
    for place in places:
        if not any(names_place(name, place) for name in tensors):
            raise TargetError(
                f"{what} showed no tensor at the further output {place} while it ran",
                next_step="Name a submodule that the layer calls, and an index of what it returns or takes.",
            )


def names_place(name: str, place: FurtherPlace) -> bool:
    """Decide whether a tensor's name is that of a place, or of one of several tensors there."""
    return name == place.name or name.startswith(f"{place.name}.")


def further_file(layer: int) -> str:
    """Return the file that holds a layer's further outputs."""
    return f"layer_{layer}.further.safetensors"


def _named_tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _named_tensors(f"{name}.{key}", one)
    elif isinstance(value, (tuple, list)):
        for index, one in enumerate(value):
            yield from _named_tensors(f"{name}.{index}", one)
