"""LayerFloor: what a golden kept of one layer's noise floor, for the real tokens.

T real tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from compare.batch import Batch
from compare.norms import Squares
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import CaptureError
from minimax_tools.floor import massive_error_name, ordinary_error_name, variant_name
from minimax_tools.sites import Site


class LayerFloor:
    """The floor statistics of one layer.

    Args:
        reference: The golden.
        batch: Which rows are real.
        layer: The layer.
    """

    def __init__(self, reference: CaptureSource, batch: Batch, *, layer: int) -> None:
        self._reference = reference
        self._batch = batch
        self._layer = layer
        description = reference.known_description
        self._variants = () if description is None else description.floor_variants

    def statistic(self, name: str) -> torch.Tensor | None:
        """One of the golden's own statistics, [T]; None where it kept none of that name."""
        statistic = self._reference.read_floor(self._layer, name)
        return None if statistic is None else self._batch.tokens(statistic)

    def largest(self, name: str) -> torch.Tensor | None:
        """The same of the golden or of a variant of its layer, whichever is the largest at a token, [T].

        Raises:
            CaptureError: The golden says that it measured a variant, and has none of it.
        """
        own = self.statistic(name)
        if own is None:
            return None
        return torch.stack((own, *(self._of_variant(variant, name) for variant in self._variants))).amax(
            dim=0
        )

    def squares(self, site: Site) -> Squares | None:
        """(golden − twin)² summed per token; None where the golden kept nothing of that site."""
        return _squares(site, self.statistic)

    def widened_squares(self, site: Site) -> Squares | None:
        """(golden or variant − twin)², the largest per token; None of a golden without variants.

        Raises:
            CaptureError: The golden says that it measured a variant, and has none of it.
        """
        return _squares(site, self.largest) if self._variants else None

    def _of_variant(self, variant: str, name: str) -> torch.Tensor:
        found = self.statistic(variant_name(variant, name))
        if found is None:
            raise CaptureError(
                f"{self._reference.directory} holds no {name} of variant {variant} of layer {self._layer}",
                expected="the statistics of every variant that its manifest names",
                next_step="Run the capture again.",
            )
        return found


def _squares(site: Site, read: Callable[[str], torch.Tensor | None]) -> Squares | None:
    """The squares of a site's error norms, read by their names; None where one is missing."""
    ordinary, massive = (read(name) for name in (ordinary_error_name(site), massive_error_name(site)))
    return None if ordinary is None or massive is None else Squares.of(ordinary=ordinary, massive=massive)
