"""A golden's tensors, with NaN and noise floor checked as they are read.

A tensor that cannot be read is skipped: at the end, `checks` reads all files once more, and its digests check names the
damage.
"""

from __future__ import annotations

import torch

from gpu_reference.certification.golden_checks import Tally, count_nonfinite
from minimax_tools.capture.manifest import Check, Entry
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.errors import CaptureError
from minimax_tools.metrics.noise_floor import error_name, error_norms
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site

# Relative difference allowed between a stored and a recomputed error norm. Float32 sums in another order differ by far
# less.
_FLOOR_TOLERANCE = 1e-3


class CheckedCapture:
    """A golden whose NaN and Inf, and whose errors of the noise floor, are counted as it is read.

    Its methods check real positions only; their `real` is bool [B,S], false on padding.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._floor = Tally(name="noise_floor", missing="the golden kept no float32 twins")
        self._finite = Tally(name="no_nan", missing="it holds no tensor")

    @property
    def is_float32(self) -> bool:
        """True if the golden was computed in float32. Its tensors are then their own float32 twins."""
        return self.capture.description.provenance.dtypes.get("weights") == "float32"

    def read_inputs(self) -> Inputs | None:
        """Read the golden's inputs; None if they cannot be read."""
        try:
            return self.capture.read_inputs()
        except CaptureError:
            return None

    def read_layer(self, layer: int) -> dict[Site, torch.Tensor]:
        """Read the stored sites of a layer, without those that cannot be read."""
        stored = {}
        for site in self.capture.sites(layer):
            entry = self.capture.entry(layer, site)
            tensor = None if entry is None else self._read(entry)
            if tensor is not None:
                stored[site] = tensor
        return stored

    def read_twins(
        self, layer: int, stored: dict[Site, torch.Tensor], real: torch.Tensor
    ) -> dict[Site, torch.Tensor]:
        """Read the float32 twins of a layer, and count their NaN and Inf. A float32 golden's are the `stored` sites."""
        if self.is_float32:
            return {site: tensor for site, tensor in stored.items() if site is not Site.INPUT}
        twins = {}
        for site in Site:
            try:
                twin = self.capture.read_twin(layer, site)
            except CaptureError:
                # The digests check names it.
                continue
            if twin is not None:
                twins[site] = twin
                self.check_finite(site, twin, real, f"the float32 twin of {site} of layer {layer}")
        return twins

    def check_floor(
        self,
        layer: int,
        stored: dict[Site, torch.Tensor],
        twins: dict[Site, torch.Tensor],
        real: torch.Tensor,
    ) -> None:
        """Check that the stored noise floor is the distance of the stored sites from their twins."""
        for site, twin in twins.items():
            if site not in stored or stored[site].shape != twin.shape:
                # Not stored, or unreadable; a shape that differs is the digests check's fault to name.
                continue
            name = error_name(site)
            try:
                stored_norms = self.capture.read_floor(layer, name)
            except CaptureError:
                # The digests check names it.
                continue
            if stored_norms is None:
                continue
            norms = error_norms(site, stored[site], twin, real=real)[name]
            is_same = torch.allclose(norms, stored_norms, rtol=_FLOOR_TOLERANCE, atol=0.0)
            if is_same:
                self._floor.add()
            else:
                self._floor.add(f"{name} of layer {layer}")

    def check_finite(self, site: Site, tensor: torch.Tensor, real: torch.Tensor, where: str) -> None:
        """Check that a tensor of a layer holds no NaN or Inf."""
        count = count_nonfinite(site, tensor, real)
        if count:
            self._finite.add(f"{count} of {where}")
        else:
            self._finite.add()

    def check_model_sites(self, real: torch.Tensor) -> None:
        """Check that the sites outside the layers hold no NaN or Inf."""
        model_sites = {str(site) for site in ModelSite}
        for entry in self.capture.manifest.entries:
            if entry.layer is not None or entry.site not in model_sites:
                continue
            tensor = self._read(entry)
            count = 0 if tensor is None else int((~torch.isfinite(tensor[real])).sum())
            if count:
                # Not `add`: the number of tensors in the certificate is that of the layers' tensors.
                self._finite.faults.append(f"{count} of {entry.site}")

    def checks(self) -> list[Check]:
        """Return the checks of everything read so far; the digests cover all stored tensors."""
        inspection = inspect_capture(self.capture)
        digests = Tally(name="digests", missing="it holds no tensor", count=inspection.num_tensors)
        digests.faults += inspection.faults
        return [
            digests.check("tensors agree with their digests"),
            self._floor.check("stored distances are those from the golden to its float32 twins"),
            self._finite.check("tensors hold no NaN or Inf on a real token"),
        ]

    def _read(self, entry: Entry) -> torch.Tensor | None:
        try:
            return self.capture.read_entry(entry)
        except CaptureError:
            # The digests check names it.
            return None
