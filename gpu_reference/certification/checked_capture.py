"""A golden's tensors, with digests, NaN and noise floor checked as they are read."""

from __future__ import annotations

import torch

from gpu_reference.certification.check_tally import Tally
from gpu_reference.certification.golden_checks import num_nonfinite
from minimax_tools.capture.certificate import Check
from minimax_tools.capture.inspection import inspect_capture
from minimax_tools.capture.manifest import Entry
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CaptureError
from minimax_tools.metrics.noise_floor import error_name, error_norms
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site

# Float32 sums taken in another order differ by less.
_FLOOR_TOLERANCE = 1e-3


class CheckedCapture:
    """A golden that is checked as it is read: damage, NaN and Inf, and a wrong noise floor are counted."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._digests = Tally(name="digests", missing="it holds no tensor")
        self._floor = Tally(name="noise_floor", missing="the golden kept no float32 twins")
        self._finite = Tally(name="no_nan", missing="it holds no tensor")

    @property
    def is_float32(self) -> bool:
        """True if the golden was computed in float32: its tensors are then as exact as twins."""
        return self.capture.description.provenance.dtypes.get("weights") == "float32"

    def read_inputs(self) -> Inputs | None:
        """Read the golden's inputs; None if they cannot be read."""
        try:
            return self.capture.read_inputs()
        except CaptureError:
            return None

    def read_layer(self, layer: int) -> dict[Site, torch.Tensor]:
        """Read the stored sites of a layer, without those that cannot be read."""
        return {
            site: tensor
            for site in self.capture.sites(layer)
            if (entry := self.capture.entry(layer, site)) is not None
            and (tensor := self._read(entry)) is not None
        }

    def read_twins(
        self, layer: int, stored: dict[Site, torch.Tensor], real: torch.Tensor
    ) -> dict[Site, torch.Tensor]:
        """Read the stored float32 twins of a layer; a float32 golden is its own twin. `real` is bool [B,S]."""
        if self.is_float32:
            return {site: tensor for site, tensor in stored.items() if site is not Site.INPUT}
        twins = {}
        for site in Site:
            try:
                twin = self.capture.read_twin(layer, site)
            except CaptureError:
                continue
            if twin is not None:
                twins[site] = twin
                self.count_nonfinite(site, twin, real, f"the float32 twin of {site} of layer {layer}")
        return twins

    def take_floor(
        self,
        layer: int,
        stored: dict[Site, torch.Tensor],
        twins: dict[Site, torch.Tensor],
        real: torch.Tensor,
    ) -> None:
        """Compare the stored noise floor with the distances from the stored sites to their twins, on the real rows."""
        for site, twin in twins.items():
            name = error_name(site)
            try:
                kept = self.capture.read_floor(layer, name) if site in stored else None
            except CaptureError:
                continue
            if kept is not None and stored[site].shape == twin.shape:
                found = error_norms(site, stored[site], twin, real=real)[name]
                is_same = torch.allclose(found, kept, rtol=_FLOOR_TOLERANCE, atol=0.0)
                self._floor.add(None if is_same else f"{name} of layer {layer}")

    def count_nonfinite(self, site: Site, tensor: torch.Tensor, real: torch.Tensor, where: str) -> None:
        """Count NaN and Inf on the real rows, bool [B,S]."""
        count = num_nonfinite(site, tensor, real)
        self._finite.add(f"{count} of {where}" if count else None)

    def read_model_sites(self, real: torch.Tensor) -> None:
        """Read the sites outside the layers, and count NaN and Inf on the real rows, bool [B,S]."""
        for entry in self.capture.manifest.entries:
            if entry.layer is not None:
                continue
            tensor = self._read(entry)
            if tensor is not None and entry.site in {str(site) for site in ModelSite}:
                count = int((~torch.isfinite(tensor[real])).sum())
                if count:
                    self._finite.faults.append(f"{count} of {entry.site}")

    def checks(self) -> list[Check]:
        """Return the checks of everything read so far; the digests cover all stored tensors."""
        inspection = inspect_capture(self.capture)
        self._digests.count, self._digests.faults = inspection.num_tensors, list(inspection.faults)
        return [
            self._digests.check("tensors agree with their digests"),
            self._floor.check("stored distances are those from the golden to its float32 twins"),
            self._finite.check("tensors hold no NaN or Inf on a real row"),
        ]

    def _read(self, entry: Entry) -> torch.Tensor | None:
        try:
            return self.capture.read_entry(entry)
        except CaptureError:
            # The inspection names it.
            return None
