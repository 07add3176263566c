"""LegacyCapture: the `.pt` files of scripts before mm2, read as a capture.

A golden is a folder of `layer_N_output.pt`, with `embedding_output.pt` and `metadata.pt` beside them, and perhaps
`layer_N_input.pt`, norm and logits. Without its own file, a layer's input is the output before it. A device run is a
folder with one `layer_output.pt` (a single layer) or `layers_output.pt` (a range of layers). A range keeps the input of
its first layer and the output of its last layer only.
"""

from __future__ import annotations

from pathlib import Path

import torch

from minimax_tools.dumps.legacy_layout import (
    LEGACY_LAYOUT,
    LegacyFiles,
    LegacyLayout,
    LegacyPlace,
    describe_value,
    find_tensor,
    is_legacy,
    read_layout,
)
from minimax_tools.dumps.placed_capture import PlacedCapture
from minimax_tools.errors import CaptureError
from minimax_tools.model.sites import ModelSite, Site


class LegacyCapture(PlacedCapture[LegacyPlace]):
    """A folder of `.pt` files opened for reading; one file is in memory at a time.

    Such files hold the batch as the golden does, padding included, so tensors are read as they lie.
    """

    def __init__(self, files: LegacyFiles, layout: LegacyLayout) -> None:
        super().__init__(files.directory, layout.places)
        self._files = files
        self._layout = layout

    @classmethod
    def open(cls, directory: Path) -> LegacyCapture:
        """Open a folder of this layout.

        Raises:
            CaptureError: The folder holds no such file, one is damaged, or does not say which layers it is of.
        """
        if not is_legacy(directory):
            raise CaptureError(
                f"no capture at {directory}",
                expected=LEGACY_LAYOUT,
                next_step="Name the folder that holds the files themselves.",
            )
        files = LegacyFiles(directory)
        return cls(files, read_layout(files))

    def read(self, layer: int, site: Site) -> torch.Tensor:
        """Read a site's tensor to the CPU, in its stored dtype; [B,S,H] if the files tell B and S."""
        place = self._find(layer, site)
        if place is None:
            raise CaptureError(
                f"{self.directory} holds no {site} of layer {layer}",
                found=", ".join(f"layer {held}: {'/'.join(self.sites(held))}" for held in self.layers),
                next_step="Such files keep inputs and outputs of layers only; for more, capture with mm2.",
            )
        return self._read(place)

    def read_model(self, site: ModelSite) -> torch.Tensor:
        """Read the tensor of a site outside the layers."""
        place = self._layout.places.get((None, site))
        if place is None:
            raise CaptureError(
                f"{self.directory} holds no {site}", next_step="Only whole-model runs capture it."
            )
        return self._read(place)

    def read_attention_mask(self) -> torch.Tensor | None:
        """Read the mask, int64 [B,S], 1 on real tokens; None if no file holds one.

        Raises:
            CaptureError: The stored mask does not tell real tokens from padding.
        """
        if self._layout.mask is None:
            return None
        mask = find_tensor(self._layout.mask, keys=())  # a tensor, or the first or only one of its container
        if mask is None or mask.ndim not in (1, 2) or not bool(((mask == 0) | (mask == 1)).all()):
            raise CaptureError(
                f"the attention mask of {self.directory} does not tell real tokens from padding",
                expected="[B,S] of 0 and 1",
                found=describe_value(self._layout.mask),
                next_step="Capture again with mm2, which stores the rows it ran.",
            )
        return (mask[None] if mask.ndim == 1 else mask).to(torch.int64)

    def _read(self, place: LegacyPlace) -> torch.Tensor:
        tensor = self._files.read(place)
        shape = self._layout.batch_shape
        if tensor.ndim == 2 and shape is not None and tensor.shape[0] == shape[0] * shape[1]:
            return tensor.reshape(*shape, -1)
        return tensor
