"""Capture: reads a capture directory; tensors are read when asked for, one at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from minimax_tools.capture.manifest import INPUTS_NAME, Description, Entry, Manifest, dtype_name
from minimax_tools.errors import CaptureError
from minimax_tools.inputs import Inputs
from minimax_tools.run import Mode
from minimax_tools.sites import ModelSite, Site


class Capture:
    """A capture directory opened for reading."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._entries = {(entry.layer, entry.site): entry for entry in manifest.entries}

    @classmethod
    def open(cls, directory: Path) -> Capture:
        """Open a capture directory.

        Raises:
            CaptureError: There is no capture, or it is damaged.
        """
        return cls(directory, Manifest.read(directory))

    @property
    def description(self) -> Description:
        """What the capture is."""
        return self.manifest.description

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers stored whole, ascending."""
        return self.manifest.complete_layers

    @property
    def known_description(self) -> Description | None:
        """What the capture is; mm2's own captures always say."""
        return self.description

    @property
    def has_floor(self) -> bool:
        """Whether the noise floor was measured beside it."""
        return self.description.noise_floor != "off"

    def sites(self, layer: int) -> tuple[Site, ...]:
        """Sites stored for a layer, in execution order."""
        return tuple(site for site in Site if self.entry(layer, site) is not None)

    def model_sites(self) -> tuple[ModelSite, ...]:
        """Sites stored outside the layers."""
        return tuple(site for site in ModelSite if (None, str(site)) in self._entries)

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        """Sites that the run wanted and the port does not expose."""
        return self.manifest.not_exposed.get(layer, ())

    def entry(self, layer: int, site: Site) -> Entry | None:
        """The entry that holds a site; a layer's input may be the output of the layer before."""
        found = self._entries.get((layer, str(site)))
        if found is None and site is Site.INPUT and self.description.run.mode is Mode.CHAINED:
            return self._entries.get((layer - 1, str(Site.OUTPUT)))
        return found

    def read(self, layer: int, site: Site) -> torch.Tensor:
        """A site's tensor on the CPU, in its stored dtype.

        Raises:
            CaptureError: The capture does not hold the site, or its file is missing or damaged.
        """
        entry = self.entry(layer, site)
        if entry is None:
            raise CaptureError(
                f"{self.directory} holds no {site} of layer {layer}",
                next_step="Capture it with --sites all, or compare fewer layers.",
            )
        return self.read_entry(entry)

    def read_model(self, site: ModelSite) -> torch.Tensor:
        """The tensor of a site outside the layers.

        Raises:
            CaptureError: The run has none, or its file is missing or damaged.
        """
        entry = self._entries.get((None, str(site)))
        if entry is None:
            raise CaptureError(
                f"{self.directory} holds no {site}", next_step="Only whole-model runs capture it."
            )
        return self.read_entry(entry)

    def read_twin(self, layer: int, site: Site) -> torch.Tensor | None:
        """The float32 twin of a site; None where the floor was not kept whole."""
        if self.description.noise_floor != "full":
            return None
        return self._read_optional(f"layer_{layer}.fp32.safetensors", str(site))

    def read_model_twin(self, site: ModelSite) -> torch.Tensor | None:
        """The float32 twin of a model site; None where there is none."""
        if self.description.noise_floor != "full":
            return None
        return self._read_optional("model.fp32.safetensors", str(site))

    def read_floor(self, layer: int, name: str) -> torch.Tensor | None:
        """One of a layer's floor statistics; None where the floor was not measured."""
        if not self.has_floor:
            return None
        return self._read_optional(f"layer_{layer}.floor.safetensors", name)

    def read_model_floor(self, name: str) -> torch.Tensor | None:
        """One of the floor statistics of the model's sites; None where the floor was not measured."""
        if not self.has_floor:
            return None
        return self._read_optional("model.floor.safetensors", name)

    def read_inputs(self) -> Inputs:
        """The token rows of the run.

        Raises:
            CaptureError: The file is missing or damaged.
        """
        return Inputs(
            input_ids=self._read(INPUTS_NAME, "input_ids"),
            attention_mask=self._read(INPUTS_NAME, "attention_mask"),
            position_ids=self._read(INPUTS_NAME, "position_ids"),
            source=self.description.input_source,
        )

    def read_attention_mask(self) -> torch.Tensor:
        """int64 [B,S], 1 on real rows.

        Raises:
            CaptureError: The file is missing or damaged.
        """
        return self._read(INPUTS_NAME, "attention_mask")

    def read_hidden_states(self) -> torch.Tensor | None:
        """The hidden states [B,S,H] that the first layer was fed; None where they were made of the tokens.

        Raises:
            CaptureError: The file is missing or damaged.
        """
        return self._read_optional(INPUTS_NAME, "hidden_states")

    def read_entry(self, entry: Entry) -> torch.Tensor:
        """The tensor of an entry of the manifest.

        Raises:
            CaptureError: Its file is missing or damaged, or holds another tensor than the manifest says.
        """
        tensor = self._read(entry.file, entry.site)
        if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (entry.shape, entry.dtype):
            raise CaptureError(
                f"{self.directory / entry.file} does not match its manifest at {entry.site}",
                expected=f"{entry.dtype} {list(entry.shape)}",
                found=f"{dtype_name(tensor.dtype)} {list(tensor.shape)}",
                next_step="Run the capture again.",
            )
        return tensor

    def _read(self, file: str, name: str) -> torch.Tensor:
        tensor = self._read_optional(file, name)
        if tensor is None:
            raise CaptureError(
                f"{self.directory / file} holds no tensor {name!r}", next_step="Run the capture again."
            )
        return tensor

    def _read_optional(self, file: str, name: str) -> torch.Tensor | None:
        path = self.directory / file
        try:
            with safe_open(path, framework="pt") as tensors:
                if name not in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    return None
                tensor: torch.Tensor = tensors.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise CaptureError(
                f"{path} cannot be read", found=str(error), next_step="Run the capture again."
            ) from error
