"""GoldenFeed: what a run's layers are fed from a golden, checked before the first of them runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from minimax_tools.capture.manifest import dtype_name
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.errors import IncomparableError
from minimax_tools.model.run import Mode, Run
from minimax_tools.model.sites import Site
from neuron.builtin.layer import KeyValues

_NUM_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenFeed:
    """The values that a run takes from a golden.

    Args:
        golden: The golden.
        run: The run.
    """

    golden: Capture
    run: Run

    @property
    def description(self) -> str:
        """The golden in words."""
        return f"golden {self.golden.description.run.name}"

    def verify(self, *, model: ModelFingerprint, dtype: torch.dtype) -> None:
        """Check that the golden is of this model and dtype, and holds all that the run is fed and judged by.

        Raises:
            IncomparableError: It is not, or does not.
        """
        self.golden.refuse_void_certificate()
        self._refuse_other_model(model)
        self._refuse_other_dtype(dtype_name(dtype))
        missing = [f"layer {layer}" for layer in self.run.span if layer not in self.golden.layers]
        missing += [
            f"{site} of layer {layer}"
            for layer, site in self.needed()
            if layer in self.golden.layers and self.golden.entry(layer, site) is None
        ]
        if missing:
            raise IncomparableError(
                f"the golden {self.golden.directory} lacks {_listed(missing)}",
                found=_held(self.golden),
                next_step="Capture it with mm2-gpu extract-all --sites all, or choose layers that it holds.",
            )

    def needed(self) -> tuple[tuple[int, Site], ...]:
        """Every layer and site whose value the run takes from the golden."""
        if self.run.mode is Mode.ISOLATED:
            past = (Site.V_PROJ, Site.K_ROPE) if self.run.decode_rows else ()
            sites = (Site.INPUT, *self._border_sites(), *past)
            return tuple((layer, site) for layer in self.run.span for site in sites)
        # From the tokens on, a chained run makes its own.
        return () if self.run.model_sites else ((self.run.span.start, Site.INPUT),)

    def digest(self) -> str:
        """sha256 over the digests of all that the run is fed: a golden made anew is not resumed upon."""
        digest = hashlib.sha256()
        for layer, site in self.needed():
            entry = self.golden.entry(layer, site)
            digest.update(f"{layer} {site} {entry.sha256 if entry else None}\n".encode())
        return digest.hexdigest()

    def read(self, layer: int, site: Site) -> torch.Tensor:
        """The golden's value of a site on the CPU.

        Raises:
            CaptureError: The golden does not hold it, or its file is damaged.
        """
        return self.golden.read(layer, site)

    def border(self, layer: int) -> dict[Site, torch.Tensor]:
        """The golden's values at the border of the run's component, on the CPU; none for a whole layer."""
        return {site: self.read(layer, site) for site in self._border_sites()}

    def past(self, layer: int) -> KeyValues | None:
        """The golden's rotated keys and its values of all rows, [B,K,S,D] on the CPU; None where none are decoded."""
        if not self.run.decode_rows:
            return None
        keys = self.read(layer, Site.K_ROPE)
        values = self.read(layer, Site.V_PROJ).unflatten(-1, (keys.shape[1], keys.shape[3]))
        return keys, values.transpose(1, 2)

    def _refuse_other_model(self, model: ModelFingerprint) -> None:
        differences = self.golden.description.provenance.model.differences(model)
        if differences:
            raise IncomparableError(
                f"the golden {self.golden.directory} is of another model than this run",
                found="; ".join(differences),
                next_step="Give --model the checkpoint that the golden was captured from, or a copy of it.",
            )

    def _refuse_other_dtype(self, dtype: str) -> None:
        golden_dtype = self.golden.description.provenance.dtypes.get("weights")
        if golden_dtype != dtype:
            raise IncomparableError(
                f"the golden {self.golden.directory} computed in another dtype than this run",
                expected=str(golden_dtype),
                found=dtype,
                next_step=f"Run with --dtype {golden_dtype}, or capture a golden in {dtype}.",
            )

    def _border_sites(self) -> tuple[Site, ...]:
        return tuple(site for site in self.run.fed_sites if site is not Site.INPUT)


def _held(golden: Capture) -> str:
    layers = f"layers {golden.layers[0]} to {golden.layers[-1]}" if golden.layers else "no layer"
    return f"{layers}, captured with {len(golden.description.run.sites)} sites"


def _listed(names: list[str]) -> str:
    more = len(names) - _NUM_NAMES_SHOWN
    return ", ".join(names[:_NUM_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
