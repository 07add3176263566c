"""What the lead of several ranks tells the others: an assignment, and then an order for every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from neuron.runs.layer_input import LayerInput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """What a rank must know before the first layer.

    Args:
        folder: The checkpoint.
        target: The implementation, as the user named it.
        dtype: Dtype of weights and activations.
        inputs: The token rows; their number tells what a layer takes.
        budget_bytes: The most anonymous memory that each rank may take; None for no limit.
    """

    folder: Path
    target: str
    dtype: torch.dtype
    inputs: Inputs
    budget_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerOrder:
    """One run of one layer.

    Args:
        layer: Its number.
        given: What it is fed; it is not changed.
        sites: What to record.
        feeds: Tensors to feed at some sites instead of what the port computes there.
        keeps_past: Whether the keys and values of these rows are wanted.
        then: The layer that will run next.
    """

    layer: int
    given: LayerInput
    sites: tuple[Site, ...]
    feeds: Mapping[Site, torch.Tensor]
    keeps_past: bool
    then: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseOrder:
    """Free the layer that ran last."""
