"""CheckedCapture: a golden's tensors, their digests compared and their NaN and Inf counted as they are read."""

from __future__ import annotations

import torch

from gpu_reference.golden_checks import num_nonfinite
from gpu_reference.tallies import Tally
from minimax_tools.capture.certificate import Check
from minimax_tools.capture.manifest import Entry, digest_tensor
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CaptureError
from minimax_tools.inputs import Inputs
from minimax_tools.sites import ModelSite, Site


class CheckedCapture:
    """Reads a golden, and remembers what of it cannot be read, is other than it was, or holds no number.

    Args:
        capture: The golden.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._digests = Tally(name="digests", missing="it holds no tensor")
        self._finite = Tally(name="no_nan", missing="it holds no tensor")

    @property
    def is_float32(self) -> bool:
        """Whether the golden was computed in float32: what it stored is then as exact as a twin."""
        return self.capture.description.provenance.dtypes.get("weights") == "float32"

    def read_inputs(self) -> Inputs | None:
        """What the golden was fed; None where it cannot be read."""
        try:
            inputs = self.capture.read_inputs()
        except CaptureError as error:
            self._digests.faults.append(str(error))
            return None
        self._digests.count += 1
        if inputs.digest() != self.capture.description.inputs_digest:
            self._digests.faults.append("the inputs differ from their digest")
        return inputs

    def read_layer(self, layer: int) -> dict[Site, torch.Tensor]:
        """What it stored of a layer, as far as it can be read."""
        return {
            site: tensor
            for site in self.capture.sites(layer)
            if (entry := self.capture.entry(layer, site)) is not None
            and (tensor := self._read(entry)) is not None
        }

    def read_twins(
        self, layer: int, stored: dict[Site, torch.Tensor], real: torch.Tensor
    ) -> dict[Site, torch.Tensor]:
        """The float32 twins that it kept; of a float32 golden what it stored is as exact.

        Args:
            layer: The layer.
            stored: What was read of it.
            real: bool [B,S].
        """
        if self.is_float32:
            return {site: tensor for site, tensor in stored.items() if site is not Site.INPUT}
        twins = {}
        for site in Site:
            try:
                twin = self.capture.read_twin(layer, site)
            except CaptureError as error:
                self._digests.faults.append(str(error))
                break
            if twin is not None:
                twins[site] = twin
                self.count_nonfinite(site, twin, real, f"the float32 twin of {site} of layer {layer}")
        return twins

    def count_nonfinite(self, site: Site, tensor: torch.Tensor, real: torch.Tensor, where: str) -> None:
        """Note NaN and Inf on the real rows, bool [B,S]."""
        count = num_nonfinite(site, tensor, real)
        self._finite.count += 1
        if count:
            self._finite.faults.append(f"{count} of {where}")

    def read_model_sites(self, real: torch.Tensor) -> None:
        """Read what belongs to no layer, and note NaN and Inf on the real rows, bool [B,S]."""
        for entry in self.capture.manifest.entries:
            if entry.layer is not None:
                continue
            tensor = self._read(entry)
            if tensor is not None and entry.site in {str(site) for site in ModelSite}:
                count = int((~torch.isfinite(tensor[real])).sum())
                if count:
                    self._finite.faults.append(f"{count} of {entry.site}")

    def checks(self) -> list[Check]:
        """What reading showed so far."""
        return [
            self._digests.check("tensors agree with their digests"),
            self._finite.check("tensors hold no NaN or Inf on a real row"),
        ]

    def _read(self, entry: Entry) -> torch.Tensor | None:
        try:
            tensor = self.capture.read_entry(entry)
        except CaptureError as error:
            self._digests.faults.append(str(error))
            return None
        self._digests.count += 1
        if digest_tensor(tensor) != entry.sha256:
            place = entry.site if entry.layer is None else f"{entry.site} of layer {entry.layer}"
            self._digests.faults.append(f"{place} differs from its digest")
        return tensor
