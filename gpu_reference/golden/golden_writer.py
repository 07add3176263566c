"""The writer of a golden: sites with their noise floor; forward passes of some layers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gpu_reference.golden.noise_floor import FLOOR_SITES, NoiseFloor
from minimax_tools.capture.writer import CaptureWriter
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.machine.progress import Progress
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Run
from minimax_tools.model.sites import ModelSite, Site

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def running_only(model: PreTrainedModel, layers: range, *, with_head: bool) -> Iterator[None]:
    """Run only `layers` during the block, and the final norm only if `with_head`; a streamed model reads no others.

    A run that begins after layer 0 takes `inputs_embeds`. Without a head, the base model gives the last layer's output.
    """
    base: Any = model.get_submodule("model")
    norm = base.norm
    skipped = {number: layer for number, layer in enumerate(base.layers) if number not in layers}
    try:
        if not with_head:
            base.norm = _StandIn()
        for number in skipped:
            base.layers[number] = _StandIn()
        yield
    finally:
        base.norm = norm
        for number, layer in skipped.items():
            base.layers[number] = layer


class _StandIn(torch.nn.Module):
    """A module in place of a skipped one: returns what it was given."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


@dataclass(slots=True, kw_only=True, eq=False)
class GoldenWriter:
    """The writer of a golden's layers and of its sites outside them."""

    writer: CaptureWriter
    run: Run  # layers and sites to keep; its `computed_sites` are those that are no input of it
    floor: NoiseFloor | None  # noise floor to measure; None for none
    inputs: Inputs
    num_experts: int  # number of a layer's experts
    keeps_twins: bool  # whether to keep the floor's float32 twins too
    reader: CheckpointReader  # reader of the checkpoint, which counts the bytes read
    progress: Progress
    _num_bytes_read: int = field(init=False)  # bytes read when the layer before was written

    def __post_init__(self) -> None:
        self._num_bytes_read = self.reader.num_bytes_read

    @property
    def wanted_sites(self) -> frozenset[Site]:
        """The sites of a layer that `write_layer` needs."""
        return frozenset((*self.run.sites, Site.ROUTER_EXPERTS)) | (
            FLOOR_SITES if self.floor else frozenset()
        )

    def write_layer(self, layer: int, captured: Mapping[Site, torch.Tensor], device: torch.device) -> None:
        """Write a layer while its weights are in memory on `device`. `captured` has its `wanted_sites`, on the CPU."""
        floor = self.floor and self.floor.measure_layer(
            layer, captured, sites=self.run.computed_sites_of(layer), device=device
        )
        self.writer.write(
            layer,
            kept_sites(self.run, layer, captured, inputs=self.inputs),
            twin=floor.twin if floor and self.keeps_twins else None,
            floor=floor.statistics if floor else None,
            unreached_experts=()
            if layer in self.run.dense_layers
            else self.inputs.unreached_experts(captured[Site.ROUTER_EXPERTS], num_experts=self.num_experts),
        )
        before, self._num_bytes_read = self._num_bytes_read, self.reader.num_bytes_read
        self.progress.advance(layer, num_bytes=self._num_bytes_read - before)

    def write_model(self, captured: Mapping[ModelSite, torch.Tensor], *, hidden_states: torch.Tensor) -> None:
        """Write the sites outside the layers; `hidden_states` [B,S,H] are the last layer's output."""
        floor = self.floor and self.floor.measure_head(captured, hidden_states)
        self.writer.write(
            None,
            captured,
            twin=floor.twin if floor and self.keeps_twins else None,
            floor=floor.statistics if floor else None,
        )


def kept_sites(
    run: Run, layer: int, captured: Mapping[Site, torch.Tensor], *, inputs: Inputs
) -> dict[Site, torch.Tensor]:
    """Return the sites of a layer to store, without its input if that is the stored output of the layer before."""
    is_input_stored = layer > run.span.start and Site.OUTPUT in run.sites and inputs.expert_tokens is None
    return {
        site: captured[site] for site in run.sites_of(layer) if not (site is Site.INPUT and is_input_stored)
    }
