"""GoldenWriter: what a golden shows, written to its capture with the noise floor measured beside it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpu_reference.golden.noise_floor import FLOOR_SITES, NoiseFloor
from minimax_tools.capture.writer import CaptureWriter
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.progress import Progress
from minimax_tools.model.run import Run
from minimax_tools.model.sites import ModelSite, Site


class GoldenWriter:
    """Writes layer after layer.

    Args:
        writer: The capture.
        run: Layers and sites to keep.
        floor: Measures the noise floor; None where none is wanted.
        keeps_twins: Whether the floor's float32 twins are kept too.
        reader: The checkpoint, which counts what is read of it.
        progress: Told of every layer.
    """

    def __init__(
        self,
        writer: CaptureWriter,
        run: Run,
        *,
        floor: NoiseFloor | None,
        keeps_twins: bool,
        reader: CheckpointReader,
        progress: Progress,
    ) -> None:
        self._writer = writer
        self._run = run
        self._floor = floor
        self._keeps_twins = keeps_twins
        self._reader = reader
        self._progress = progress
        self._num_bytes_read = reader.num_bytes_read

    @property
    def wanted_sites(self) -> frozenset[Site]:
        """What `write_layer` needs of a layer."""
        return frozenset(self._run.sites) | (FLOOR_SITES if self._floor else frozenset())

    def write_layer(self, layer: int, captured: Mapping[Site, torch.Tensor], device: torch.device) -> None:
        """Write a layer; its weights must be at hand.

        Args:
            layer: Its number.
            captured: `wanted_sites`, on the CPU.
            device: Where it ran.

        Raises:
            CaptureError: The disk is full, or cannot be written to.
        """
        floor = self._floor
        twin = (
            floor.run_layer(layer, captured, sites=self._run.computed_sites, device=device) if floor else {}
        )
        statistics = (
            floor.measure_layer(layer, captured, twin)
            | floor.measure_variants(layer, captured, twin, device=device)
            if floor
            else None
        )
        self._writer.write_layer(
            layer,
            kept_sites(self._run, layer, captured),
            twin=twin if self._keeps_twins else None,
            floor=statistics,
        )
        self._progress.advance(layer, num_bytes=self._reader.num_bytes_read - self._num_bytes_read)
        self._num_bytes_read = self._reader.num_bytes_read

    def write_model(self, captured: Mapping[ModelSite, torch.Tensor], *, hidden_states: torch.Tensor) -> None:
        """Write the sites outside the layers.

        Args:
            captured: Those of the run.
            hidden_states: [B,S,H], the last layer's output.

        Raises:
            CaptureError: The disk is full, or cannot be written to.
        """
        twin = self._floor.run_head(hidden_states) if self._floor else {}
        self._writer.write_model(
            captured,
            twin=twin if self._keeps_twins else None,
            floor=self._floor.measure_head(captured, twin) if self._floor else None,
        )


def kept_sites(run: Run, layer: int, captured: Mapping[Site, torch.Tensor]) -> dict[Site, torch.Tensor]:
    """The sites of a layer to store: its input only where it is not the output of the layer before."""
    repeats = layer > run.span.start and Site.OUTPUT in run.sites
    return {site: captured[site] for site in run.sites if not (site is Site.INPUT and repeats)}
