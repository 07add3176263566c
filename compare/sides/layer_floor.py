"""LayerFloor: a layer's noise floor (what BF16 alone costs the golden), as the golden stored it.

The names of the stored statistics are listed in minimax_tools/metrics/noise_floor.py. Variants are other right ways to
round the layer; their distances from the float32 twin widen the floor.
T real tokens of the batch, F channels of a site. Rows are tokens here: `Batch.rows` gives [T,F].
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from compare.noise.squared_errors import Squares
from compare.sides.batch import Batch
from compare.sides.proven_floor import (
    refuse_empty_floor,
    refuse_other_choice,
    refuse_other_floor,
    refuse_other_router_noise,
    refuse_wrong_sums,
)
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import CaptureError
from minimax_tools.metrics.noise_floor import (
    ROUTER_MARGIN,
    ROUTER_NOISE,
    competing_places,
    error_name,
    massive_error_name,
    ordinary_error_name,
    structure_name,
    variant_name,
)
from minimax_tools.model.sites import ModelSite, Site


class LayerFloor:
    """The stored floor of one layer of the golden `reference`, for the real tokens of `batch`.

    Squared errors of a site come in two kinds: `squares` are the golden's, and `widened_squares` are the largest of
    golden and variants.
    """

    def __init__(self, reference: CaptureSource, batch: Batch, *, layer: int) -> None:
        self._reference = reference
        self._batch = batch
        self._layer = layer
        description = reference.known_description
        self._variants = () if description is None else description.floor_variants
        self._read: dict[str, torch.Tensor | None] = {}  # statistics of the real tokens, by name

    def statistic(self, name: str) -> torch.Tensor | None:
        """Read one of the golden's own statistics, [T]; None if it kept none of that name."""
        if name not in self._read:
            statistic = self._reference.read_floor(self._layer, name)
            self._read[name] = None if statistic is None else self._batch.tokens(statistic)
        return self._read[name]

    def largest(self, name: str) -> torch.Tensor | None:
        """Return the largest of a statistic over the golden and its variants, token by token, [T].

        Raises:
            CaptureError: The golden says that it measured a variant, and has none of it.
        """
        stored = self.statistic(name)
        if stored is None:
            return None
        of_variants = (self._of_variant(variant, name) for variant in self._variants)
        return torch.stack((stored, *of_variants)).amax(dim=0)

    def squares(self, site: Site) -> Squares | None:
        """Return (golden − twin)² summed per token; None if the golden kept nothing of that site.

        Raises:
            CaptureError: The golden was changed: the distances that it stored do not add up, or are all zero.
        """
        squares = read_squares(site, self.statistic)
        if squares is not None:
            refuse_empty_floor(self._reference, self._layer, site, parts=squares)
            stored = self.statistic(error_name(site))
            refuse_wrong_sums(self._reference, self._layer, site, parts=squares, stored=stored)
        return squares

    def prove(self, site: Site, measured: Squares) -> None:
        """Check the stored distances by (golden − twin)² per token, as measured from the golden's values.

        Raises:
            CaptureError: The golden was changed: it stored other distances.
        """
        stored = self.statistic(error_name(site))
        refuse_other_floor(self._reference, self._layer, site, measured=measured, stored=stored)

    def prove_router(self) -> None:
        """Check the golden's experts, and the stored noise on their scores, against its logits and their twin.

        Raises:
            CaptureError: They disagree: the golden was changed.
        """
        site, golden = Site.ROUTER_LOGITS, self._reference
        twin, stored = golden.read_twin(self._layer, site), self.statistic(ROUTER_NOISE)
        if twin is None or stored is None or site not in golden.sites(self._layer):
            return
        logits = golden.read(self._layer, site)
        scores, exact = (self._batch.rows(side, site).float().sigmoid() for side in (logits, twin))
        errors = (scores - exact).abs()
        twin_choice = golden.read_twin(self._layer, Site.ROUTER_EXPERTS)
        margin = self.statistic(ROUTER_MARGIN)
        if twin_choice is None or margin is None or Site.ROUTER_EXPERTS not in golden.sites(self._layer):
            return
        # The ranks, by biased score, of the scores that compete for the k-th place; only their number matters here.
        places = competing_places(twin_choice.shape[-1], errors.shape[-1])
        refuse_other_router_noise(
            golden, self._layer, errors=errors, stored=stored, num_competing=places.stop - places.start
        )
        golden_experts, twin_experts = (
            self._batch.rows(side, Site.ROUTER_EXPERTS)
            for side in (golden.read(self._layer, Site.ROUTER_EXPERTS), twin_choice)
        )
        refuse_other_choice(golden, self._layer, golden_experts, twin_experts, errors=errors, margin=margin)

    def widened_squares(self, site: Site) -> Squares | None:
        """Return (golden or variant − twin)², the largest per token; None for a golden without variants.

        Raises:
            CaptureError: The golden says that it measured a variant, and has none of it.
        """
        for variant in self._variants:
            self._refuse_wrong_sums(variant, site)
        return read_squares(site, self.largest) if self._variants else None

    def _refuse_wrong_sums(self, variant: str, site: Site) -> None:
        """Refuse a golden whose stored distances of a variant do not add up at a site."""
        parts = read_squares(site, lambda name: self.statistic(variant_name(variant, name)))
        if parts is not None:
            stored = self.statistic(variant_name(variant, error_name(site)))
            refuse_wrong_sums(self._reference, self._layer, site, parts=parts, stored=stored, variant=variant)

    def variant_averages(self, site: Site) -> tuple[float, ...] | None:
        """Return each of `Structure.figures` as the variants' value over the golden's: the largest variant, at least 1.

        None if no variant was measured at the site.
        """
        stored = [
            self._reference.read_floor(self._layer, variant_name(variant, structure_name(site)))
            for variant in self._variants
        ]
        measured = [figures for figures in stored if figures is not None]
        if not measured:
            return None
        return tuple(torch.stack(measured).amax(dim=0).clamp(min=1.0).tolist())

    def _of_variant(self, variant: str, name: str) -> torch.Tensor:
        statistic = self.statistic(variant_name(variant, name))
        if statistic is None:
            raise CaptureError(
                f"{self._reference.directory} holds no {name} of variant {variant} of layer {self._layer}",
                expected="the statistics of every variant that its manifest names",
                next_step="Run the capture again.",
            )
        return statistic


def read_squares(site: Site | ModelSite, read: Callable[[str], torch.Tensor | None]) -> Squares | None:
    """Square a site's two error norms, [T] over ordinary and over massive channels; None if one is missing.

    `read` returns a statistic by its name, or None.
    """
    ordinary, massive = (read(name) for name in (ordinary_error_name(site), massive_error_name(site)))
    return None if ordinary is None or massive is None else Squares.of(ordinary=ordinary, massive=massive)
