"""DumpListing: the tensors that another tool's dump holds, and the sites that they map to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTensor:
    """A tensor of another tool's dump, in all layers, forward passes and ranks."""

    name: str  # its place as a user's map (`dumps.name_map`) writes it, with `{layer}` for the layer's number
    layers: tuple[int, ...]  # layers that hold it, ascending
    shapes: tuple[tuple[int, ...], ...]  # its shapes, each once
    dtypes: tuple[str, ...]  # its dtypes, each once
    steps: tuple[str, ...]  # labels of the passes that hold it
    ranks: tuple[int, ...]  # ranks that wrote it, ascending
    sites: tuple[str, ...]  # sites that it maps to


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpListing:
    """Contents of another tool's dump."""

    format: str  # name of its layout
    steps: tuple[str, ...]  # labels of its forward passes
    # Labels of the passes that are read; those of an inner tuple follow each other for the same prompts
    passes: tuple[tuple[str, ...], ...]
    joins_requests: bool  # whether these are joined by the requests that the dump tells, prompt by prompt
    num_ranks: int  # number of ranks that the port was divided among
    tensors: tuple[ListedTensor, ...]
    unmapped: tuple[str, ...]  # modules that map to no site, with `{layer}` for the layer's number
