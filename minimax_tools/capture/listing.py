"""DumpListing: the tensors that another tool's dump holds, and the sites that they map to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTensor:
    """A tensor of another tool's dump, in all layers, forward passes and ranks.

    Args:
        name: Its place as a user's map (`dumps.name_map`) writes it, with `{layer}` for the layer's number.
        layers: Layers that hold it, ascending.
        shapes: Its shapes, each once.
        dtypes: Its dtypes, each once.
        steps: Labels of the passes that hold it.
        ranks: Ranks that wrote it, ascending.
        sites: Sites that it maps to.
    """

    name: str
    layers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    steps: tuple[str, ...]
    ranks: tuple[int, ...]
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpListing:
    """Contents of another tool's dump.

    Args:
        format: Name of its layout.
        steps: Labels of its forward passes.
        passes: Labels of the passes that are read; those of an inner tuple follow each other for the same prompts.
        num_ranks: Number of ranks that the port was divided among.
        unmapped: Modules that map to no site, with `{layer}` for the layer's number.
    """

    format: str
    steps: tuple[str, ...]
    passes: tuple[tuple[str, ...], ...]
    num_ranks: int
    tensors: tuple[ListedTensor, ...]
    unmapped: tuple[str, ...]
