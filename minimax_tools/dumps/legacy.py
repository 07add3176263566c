"""LegacyCapture: reads the `.pt` files that scripts before mm2 wrote, as one capture.

A golden is a folder of `layer_N_output.pt` with `embedding_output.pt` and `metadata.pt` beside them. A device
run is a folder with one `layer_output.pt` (a single layer) or `layers_output.pt` (a range, of which only the
first layer's input and the last layer's output are kept).
"""

from __future__ import annotations

from pathlib import Path

import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.capture.source import WithoutFloor
from minimax_tools.dumps.legacy_files import LegacyFiles, LegacyPlace, described, file_names, tensor_in
from minimax_tools.dumps.legacy_layout import LEGACY_LAYOUT, LegacyLayout, is_legacy, read_layout
from minimax_tools.errors import CaptureError
from minimax_tools.model.sites import ModelSite, Site


class LegacyCapture(WithoutFloor):
    """A folder of `.pt` files opened for reading; one file is in memory at a time."""

    def __init__(self, files: LegacyFiles, layout: LegacyLayout) -> None:
        self._files = files
        self._layout = layout

    @staticmethod
    def recognises(directory: Path) -> bool:
        """Whether the folder holds files of this layout."""
        return is_legacy(file_names(directory))

    @classmethod
    def open(cls, directory: Path) -> LegacyCapture:
        """Open a folder of this layout.

        Raises:
            CaptureError: It holds none, one is damaged, or does not say which layers it is of.
        """
        if not cls.recognises(directory):
            raise CaptureError(
                f"no capture at {directory}",
                expected=LEGACY_LAYOUT,
                next_step="Name the folder that holds the files themselves.",
            )
        files = LegacyFiles(directory)
        return cls(files, read_layout(files))

    @property
    def directory(self) -> Path:
        """Where the files lie."""
        return self._files.directory

    @property
    def known_description(self) -> Description | None:
        """None: the layout does not say what made it."""
        return None

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of which a file holds the input or the output, ascending."""
        return tuple(sorted({layer for layer, _ in self._layout.layers}))

    def sites(self, layer: int) -> tuple[Site, ...]:
        """The layer's input and output, as far as they are stored; an input may be the output before it."""
        return tuple(site for site in (Site.INPUT, Site.OUTPUT) if self._place(layer, site) is not None)

    def model_sites(self) -> tuple[ModelSite, ...]:
        """Sites stored outside the layers."""
        return tuple(site for site in ModelSite if site in self._layout.model)

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        """Nothing: the layout does not say what a run wanted."""
        return ()

    def read(self, layer: int, site: Site) -> torch.Tensor:
        """A site's tensor on the CPU, in its stored dtype; [B,S,H] where the files say what B and S are.

        Raises:
            CaptureError: The folder does not hold the site, or its file is damaged.
        """
        place = self._place(layer, site)
        if place is None:
            raise CaptureError(
                f"{self.directory} holds no {site} of layer {layer}",
                found=", ".join(f"layer {held}: {'/'.join(self.sites(held))}" for held in self.layers),
                next_step="Such files keep inputs and outputs of layers only; for more, capture with mm2.",
            )
        return self._read(place)

    def read_model(self, site: ModelSite) -> torch.Tensor:
        """The tensor of a site outside the layers.

        Raises:
            CaptureError: The folder does not hold the site, or its file is damaged.
        """
        place = self._layout.model.get(site)
        if place is None:
            raise CaptureError(
                f"{self.directory} holds no {site}", next_step="Only whole-model runs capture it."
            )
        return self._read(place)

    def read_attention_mask(self) -> torch.Tensor | None:
        """int64 [B,S], 1 on real rows; None where no file holds one.

        Raises:
            CaptureError: What is stored does not tell real rows from padding.
        """
        if self._layout.mask is None:
            return None
        mask = tensor_in(self._layout.mask, ())
        if mask is None or mask.ndim not in (1, 2) or not bool(((mask == 0) | (mask == 1)).all()):
            raise CaptureError(
                f"the attention mask of {self.directory} does not tell real rows from padding",
                expected="[B,S] of 0 and 1",
                found=described(self._layout.mask),
                next_step="Capture again with mm2, which stores the rows it ran.",
            )
        return (mask[None] if mask.ndim == 1 else mask).to(torch.int64)

    def _place(self, layer: int, site: Site) -> LegacyPlace | None:
        place = self._layout.layers.get((layer, site))
        if place is not None or site is not Site.INPUT:
            return place
        if layer == 0:
            return self._layout.model.get(ModelSite.EMBEDDING)
        return self._layout.layers.get((layer - 1, Site.OUTPUT))

    def _read(self, place: LegacyPlace) -> torch.Tensor:
        tensor = self._files.read(place)
        if tensor.ndim != 2 or self._layout.batch_shape is None:
            return tensor
        batch_size, sequence_length = self._layout.batch_shape
        if tensor.shape[0] != batch_size * sequence_length:
            return tensor
        return tensor.reshape(batch_size, sequence_length, -1)
