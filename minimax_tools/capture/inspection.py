"""CaptureInspection: a whole capture read once and checked against its digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import CaptureError
from minimax_tools.model.sites import ModelSite, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureInspection:
    """Results of reading all of a capture.

    Args:
        num_tensors: Tensors that match their digests.
        faults: Tensors that cannot be read or do not match, in words, with file and place.
    """

    num_tensors: int
    faults: tuple[str, ...]


def inspect_capture(capture: CaptureSource, *, with_inputs: bool = True) -> CaptureInspection:
    """Read every tensor of a capture, one in memory at a time, and check its digest.

    Float32 twins without digests, of an older mm2, are checked for dtype, shape and finite values.

    Args:
        capture: A capture with a manifest, complete or not.
        with_inputs: Whether to read the token rows too.
    """
    num_tensors, faults = 0, []
    for read in _reads(capture, with_inputs=with_inputs):
        try:
            num_tensors += read()
        except CaptureError as error:
            faults.append(error.what if error.found is None else f"{error.what}: found {error.found}")
    return CaptureInspection(num_tensors=num_tensors, faults=tuple(dict.fromkeys(faults)))


def _reads(capture: CaptureSource, *, with_inputs: bool) -> Iterator[Callable[[], int]]:
    """Yield calls that each read a part and return the number of its tensors."""
    if with_inputs:
        yield partial(_count, capture.read_inputs, 3)
        yield partial(_count, capture.read_hidden_states)
        yield partial(_count, capture.read_generation, 0)
    for entry in capture.manifest.entries:
        yield partial(_count, partial(capture.read_entry, entry))
    digests = capture.manifest.digests
    listed = (
        {} if digests is None else {one.file: [name for name, _ in one.tensors] for one in digests.tensors}
    )
    for layer in capture.layers:
        for site in Site:
            yield partial(_count, partial(capture.read_twin, layer, site))
        for name in listed.get(f"layer_{layer}.floor.safetensors", ()):
            yield partial(_count, partial(capture.read_floor, layer, name))
    if capture.model_sites():
        for model_site in ModelSite:
            yield partial(_count, partial(capture.read_model_twin, model_site))
        for name in listed.get("model.floor.safetensors", ()):
            yield partial(_count, partial(capture.read_model_floor, name))


def _count(read: Callable[[], Any], num_tensors: int = 1) -> int:
    return 0 if read() is None else num_tensors
