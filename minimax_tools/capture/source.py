"""CaptureSource: what a comparison asks of a capture, whoever wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.model.sites import ModelSite, Site


class CaptureSource(Protocol):
    """A readable capture; `Capture` is mm2's own, `LegacyCapture` reads the seeds' files."""

    @property
    def directory(self) -> Path:
        """Where the capture lies."""

    @property
    def known_description(self) -> Description | None:
        """What made the capture; None where its layout does not say."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that the capture holds, ascending."""

    def sites(self, layer: int) -> tuple[Site, ...]:
        """Sites stored for a layer, in execution order; an input may be the output of the layer before."""

    def model_sites(self) -> tuple[ModelSite, ...]:
        """Sites stored outside the layers."""

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        """Sites that the run wanted and the port does not expose."""

    def read(self, layer: int, site: Site) -> torch.Tensor:
        """A site's tensor on the CPU, in its stored dtype; CaptureError where there is none."""

    def read_twin(self, layer: int, site: Site) -> torch.Tensor | None:
        """The float32 twin of a site, where the floor was kept whole."""

    def read_floor(self, layer: int, name: str) -> torch.Tensor | None:
        """One of a layer's floor statistics, where the floor was measured."""

    def read_model(self, site: ModelSite) -> torch.Tensor:
        """The tensor of a site outside the layers; CaptureError where there is none."""

    def read_model_twin(self, site: ModelSite) -> torch.Tensor | None:
        """The float32 twin of a model site, where the floor was kept whole."""

    def read_attention_mask(self) -> torch.Tensor | None:
        """int64 [B,S], 1 on real rows; None where the layout does not keep it (every row is real then)."""


class WithoutFloor:
    """What a capture of a layout that keeps no noise floor gives of it: nothing."""

    def read_twin(self, layer: int, site: Site) -> torch.Tensor | None:
        """None."""
        return None

    def read_model_twin(self, site: ModelSite) -> torch.Tensor | None:
        """None."""
        return None

    def read_floor(self, layer: int, name: str) -> torch.Tensor | None:
        """None."""
        return None
