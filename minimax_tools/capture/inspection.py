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
    """Results of reading all of a capture."""

    num_tensors: int  # number of tensors that match their digests
    faults: tuple[str, ...]  # a sentence for each fault found, with file and place


def inspect_capture(capture: CaptureSource, *, with_inputs: bool = True) -> CaptureInspection:
    """Read every tensor of a capture, one in memory at a time, and check its digest.

    Float32 twins without digests, of an older mm2, are checked for dtype, shape and finite values.

    Args:
        capture: A capture with a manifest, complete or not.
        with_inputs: Whether to read the token rows, hidden states, generated tokens and passes too.
    """
    num_tensors = 0
    # A set that keeps its order: a damaged file fails in the same words for all its tensors.
    faults: dict[str, None] = {}
    for read, num_read in _reads(capture, with_inputs=with_inputs):
        try:
            if read() is not None:
                num_tensors += num_read
        except CaptureError as error:
            faults[error.what if error.found is None else f"{error.what}: found {error.found}"] = None
    return CaptureInspection(num_tensors=num_tensors, faults=tuple(faults))


def _reads(capture: CaptureSource, *, with_inputs: bool) -> Iterator[tuple[Callable[[], Any], int]]:
    """Yield calls that each read a part of the capture, or None if it has none, with the part's number of tensors."""
    if with_inputs:
        yield capture.read_inputs, 3  # ids, mask and positions
        yield capture.read_hidden_states, 1
        yield capture.read_generation, 0  # JSON
        yield capture.read_passes, 0  # JSON
    for entry in capture.manifest.entries:
        yield partial(capture.read_entry, entry), 1
    for layer in capture.layers:
        for site in Site:
            yield partial(capture.read_twin, layer, site), 1
        for name in capture.manifest.names_in(f"layer_{layer}.floor.safetensors"):
            yield partial(capture.read_floor, layer, name), 1
        for name in capture.further(layer):
            yield partial(capture.read_further, layer, name), 1
        yield partial(capture.read_cache, layer), 2  # keys and values
    if capture.model_sites():
        for model_site in ModelSite:
            yield partial(capture.read_model_twin, model_site), 1
        for name in capture.manifest.names_in("model.floor.safetensors"):
            yield partial(capture.read_model_floor, name), 1
