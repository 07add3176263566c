"""Sides: two captures that may be compared, what they have in common, and how to judge them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compare.limits.criteria import Criteria
from compare.limits.limit_context import LimitContext, backend_of, computes_in_float32
from compare.sides.batch import Batch
from compare.sides.golden_weights import WeightSource
from compare.sides.pairing import find_mismatch
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import Site


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sides:
    """The golden, the device run, their common batch, the criteria, and the golden's weights where they are known."""

    reference: CaptureSource
    target: CaptureSource
    batch: Batch
    criteria: Criteria
    weights: WeightSource | None = None

    @property
    def is_classic(self) -> bool:
        """True where the five classic limits judge."""
        return self.criteria.name == "classic"

    def limit_context(self, *, hides_flips: bool = False) -> LimitContext:
        """Return the context of limits; the caller knows whether flips are hidden."""
        return LimitContext(
            backend=backend_of(self.target),
            is_float32=computes_in_float32(self.reference),
            share=self.criteria.share,
            hides_flips=hides_flips,
        )

    def read_rows(self, layer: int, site: Site) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Read both sides' real rows [T,F]; None where a side lacks them, or they cannot be compared."""
        if site not in self.reference.sites(layer) or site not in self.target.sites(layer):
            return None
        reference, target = self.reference.read(layer, site), self.target.read(layer, site)
        if find_mismatch(reference, target) is not None:
            return None
        return self.batch.rows(reference, site), self.batch.rows(target, site)

    def read_golden(self, layer: int, site: Site) -> torch.Tensor | None:
        """Read the golden's real rows, [T,F] float32; None where it lacks them."""
        if site not in self.reference.sites(layer):
            return None
        return self.batch.rows(self.reference.read(layer, site), site).float()

    def read_exact(self, layer: int, site: Site) -> torch.Tensor | None:
        """Read the float32 twin, else the golden: real rows, [T,F] float32."""
        twin = self.reference.read_twin(layer, site)
        return self.read_golden(layer, site) if twin is None else self.batch.rows(twin, site).float()

    def read_stream(self, layer: int, *, is_exact: bool) -> torch.Tensor | None:
        """Read the stream that the experts' sum is added to, [T,H] float32: the residual, else output − sum.

        Args:
            layer: The layer.
            is_exact: Whether to read the best that is known of it, and not what the golden holds.
        """
        read = self.read_exact if is_exact else self.read_golden
        residual, output, added = (
            read(layer, site) for site in (Site.ATTN_RESIDUAL, Site.OUTPUT, Site.MOE_DELTA)
        )
        if residual is not None or output is None or added is None:
            return residual
        return output - added
