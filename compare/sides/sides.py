"""Sides: the two captures of a comparison, their common batch, and what they are judged by."""

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
    """The golden (`reference`), the device run (`target`), and what they are judged by."""

    reference: CaptureSource
    target: CaptureSource
    batch: Batch  # tells the real tokens of both sides
    criteria: Criteria  # limits of ρ, or classic ones: fixed, on differences and correlations
    weights: WeightSource | None = None  # the golden's checkpoint

    @property
    def is_classic(self) -> bool:
        """True if the five classic limits judge."""
        return self.criteria.name == "classic"

    def limit_context(self, *, hides_flips: bool = False) -> LimitContext:
        """Return the facts that limits depend on; `hides_flips` if flips cannot be told from other tokens."""
        return LimitContext(
            backend=backend_of(self.target),
            is_float32=computes_in_float32(self.reference),
            share=self.criteria.share,
            hides_flips=hides_flips,
        )

    def read_rows(self, layer: int, site: Site) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Read both sides' real tokens [T,F]; None if a side lacks them, or they cannot be compared."""
        if site not in self.reference.sites(layer) or site not in self.target.sites(layer):
            return None
        reference, target = self.reference.read(layer, site), self.target.read(layer, site)
        if find_mismatch(reference, target) is not None:
            return None
        return self.batch.rows(reference, site), self.batch.rows(target, site)

    def read_golden(self, layer: int, site: Site) -> torch.Tensor | None:
        """Read the golden's real tokens, [T,F] float32; None if it lacks them."""
        if site not in self.reference.sites(layer):
            return None
        return self.batch.rows(self.reference.read(layer, site), site).float()

    def read_exact(self, layer: int, site: Site) -> torch.Tensor | None:
        """Read the real tokens of the float32 twin, or of the golden if it kept no twin: [T,F] float32."""
        twin = self.reference.read_twin(layer, site)
        return self.read_golden(layer, site) if twin is None else self.batch.rows(twin, site).float()

    def holds_stream(self, layer: int) -> bool:
        """Decide whether the golden kept the residual stream, or what it follows from (see `read_stream`)."""
        held = self.reference.sites(layer)
        return Site.ATTN_RESIDUAL in held or (Site.OUTPUT in held and Site.MOE_DELTA in held)

    def read_stream(self, layer: int, *, is_exact: bool) -> torch.Tensor | None:
        """Read the golden's residual stream that the experts' sum is added to, [T,H] float32.

        A golden that did not keep it has it as output − sum. `is_exact` prefers float32 twins to the golden's values.
        """
        read = self.read_exact if is_exact else self.read_golden
        residual = read(layer, Site.ATTN_RESIDUAL)
        if residual is not None:
            return residual
        output, added = read(layer, Site.OUTPUT), read(layer, Site.MOE_DELTA)
        return None if output is None or added is None else output - added
