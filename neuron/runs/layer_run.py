"""LayerRun: what one run of one layer gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from minimax_tools.model.sites import Site
from neuron.builtin.layer import KeyValues
from neuron.runs.layer_times import LayerTimes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRun:
    """What a layer gave, on the CPU.

    Args:
        output: The layer's output [B,S,H].
        tensors: The sites asked for and exposed.
        not_exposed: The sites asked for that the port does not expose.
        router_dtypes: Dtype of the router gate and of the correction bias as loaded, where they can be told.
        key_values: Rotated keys and values [B,K,S,D] of the rows that were fed; None where nobody asked.
        times: Where the time went.
    """

    output: torch.Tensor
    tensors: Mapping[Site, torch.Tensor]
    not_exposed: tuple[Site, ...]
    router_dtypes: Mapping[str, str]
    key_values: KeyValues | None = None
    times: LayerTimes = field(default_factory=LayerTimes)
