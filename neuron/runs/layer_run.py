"""A single run of a layer: its input, request and result.

A column is one index along the padded length of the batch. A pass computes S columns, after P earlier ones, the past.
B batch, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from minimax_tools.capture.further import FurtherPlace
from minimax_tools.capture.held_weights import HeldWeights
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from neuron.builtin.layer import KeyValues
from neuron.runs.layer_times import LayerTimes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerInput:
    """The input of one forward pass of a layer, on the CPU."""

    hidden_states: torch.Tensor  # hidden states [B,S,H] of this pass's columns
    attention_mask: torch.Tensor  # mask [B,P+S] of 0/1, the past's columns first
    position_ids: torch.Tensor  # positions [B,S] of this pass's columns
    # Rotated keys and values of earlier columns, [B,K,P,D] each; None without earlier columns.
    past: KeyValues | None = None

    def __post_init__(self) -> None:
        num_past = 0 if self.past is None else self.past[0].shape[2]
        expected = (self.batch_size, num_past + self.num_columns)
        if tuple(self.attention_mask.shape) != expected:
            raise ValueError(f"the mask is {list(self.attention_mask.shape)}, expected {list(expected)}")

    @classmethod
    def of(cls, hidden_states: torch.Tensor, inputs: Inputs) -> LayerInput:
        """Build the input of one pass over all columns of a batch."""
        return cls(
            hidden_states=hidden_states,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
        )

    @property
    def batch_size(self) -> int:
        """The batch size B."""
        return self.hidden_states.shape[0]

    @property
    def num_columns(self) -> int:
        """The number S of columns of this pass."""
        return self.hidden_states.shape[1]

    def first(self, num_columns: int) -> LayerInput:
        """Return the input of the first columns alone; only without a past."""
        assert self.past is None, "columns with a past are not cut"
        return LayerInput(
            hidden_states=self.hidden_states[:, :num_columns],
            attention_mask=self.attention_mask[:, :num_columns],
            position_ids=self.position_ids[:, :num_columns],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRequest:
    """A request to run one layer once."""

    layer: int
    layer_input: LayerInput  # the layer's input, which is not changed
    sites: tuple[Site, ...] = ()  # the sites to record
    further: tuple[FurtherPlace, ...] = ()  # further outputs to record, which are no sites
    # Golden values that replace what the port computes at these sites.
    border: Mapping[Site, torch.Tensor] = field(default_factory=dict)
    keeps_past: bool = False  # whether the port must return keys and values
    next_layer: int | None = None  # the layer that runs next, to be read ahead; None after the last


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRun:
    """The result of one run of a layer, on the CPU."""

    output: torch.Tensor  # the layer's output [B,S,H]
    tensors: Mapping[Site, torch.Tensor]  # the values of the sites asked for and exposed
    not_exposed: tuple[Site, ...]  # the sites asked for that the port does not expose
    # Dtypes of the router gate and of the correction bias as loaded, as far as they are found.
    router_dtypes: Mapping[str, str]
    # Rotated keys and values of this pass's columns, [B,K,S,D] each; None unless `keeps_past` was asked for.
    key_values: KeyValues | None = None
    further: Mapping[str, torch.Tensor] = field(default_factory=dict)  # further outputs by name
    # What the port holds of the layer's weights; None if they were not loaded for this run, or not compared.
    held_weights: HeldWeights | None = None
    # How often the port computed sites that it does not expose because their parts do not add up to the batch
    num_calls: Mapping[Site, int] = field(default_factory=dict)
    times: LayerTimes = field(default_factory=LayerTimes)  # time by phase
