"""LayerFloor: the noise floor of a layer (what BF16 alone costs the golden), as the golden stored it, and its proof.

A golden stores its BF16 error twice: as a float32 twin beside its value, and as distances ‖value − twin‖ per token. If
a value, a twin or a distance was changed, the two disagree, whatever digests the golden was given. Names of statistics:
minimax_tools/metrics/noise_floor.py. T real tokens, F channels, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from compare.limits.limits import computes_in_float32
from compare.noise.rows import TINY_FLOAT32, Squares
from compare.sides.sides import Batch
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
from minimax_tools.model.router import rank_without_bias
from minimax_tools.model.sites import ModelSite, Site

# Relative. Stored distances are float32 sums in another order: off by 6e-7 with 6144 channels, 2e-5 with 200 064.
_TOLERANCE = 1e-3
# Absolute. Biased scores are float32 numbers from about 1 to 10, so this is a few roundings.
_SCORE_SLACK = 2e-6
_AGAIN = "Copy the golden again from where it was made, or make it again: mm2-gpu extract-all."


class LayerFloor:
    """The stored floor of one layer of the golden `reference`, or of what is outside the layers (None).

    It is that of the real tokens of `batch`. All methods raise CaptureError for a golden that was changed.

    Squared errors of a site come in two kinds: `squares` are the golden's, and `widened_squares` are the largest of
    golden and variants.
    """

    def __init__(self, reference: CaptureSource, batch: Batch, *, layer: int | None) -> None:
        self._reference = reference
        self._batch = batch
        self._layer = layer
        description = reference.known_description
        self._variants = () if description is None else description.floor_variants
        self._read: dict[str, torch.Tensor | None] = {}  # statistics of the real tokens, by name

    def statistic(self, name: str) -> torch.Tensor | None:
        """Read one of the golden's own statistics, [T]; None if it kept none of that name."""
        if name not in self._read:
            statistic = self._read_floor(name)
            self._read[name] = None if statistic is None else self._batch.tokens(statistic)
        return self._read[name]

    def largest(self, name: str) -> torch.Tensor | None:
        """Return the largest of a statistic over the golden and its variants, token by token, [T]."""
        stored = self.statistic(name)
        if stored is None:
            return None
        of_variants = (self._of_variant(variant, name) for variant in self._variants)
        return torch.stack((stored, *of_variants)).amax(dim=0)

    def squares(self, site: Site | ModelSite) -> Squares | None:
        """Return (golden − twin)² summed per token; None if the golden kept nothing of that site."""
        squares = read_squares(site, self.statistic)
        if squares is not None:
            self._prove_not_empty(site, squares)
            self._prove_sums(site, squares)
        return squares

    def prove(self, site: Site | ModelSite, measured: Squares) -> None:
        """Check the stored distances by (golden − twin)² per token, as measured from the golden's values."""
        stored = self.statistic(error_name(site))
        if stored is None:
            raise CaptureError(
                f"the golden {self._reference.directory} is damaged: {self._group}.floor.safetensors holds no "
                f"{error_name(site)}, and {self._group}.fp32.safetensors a float32 twin of {self._place(site)}",
                next_step=_AGAIN,
            )
        # NaN in the golden is refused later, when its values are judged.
        is_finite = measured.whole.isfinite()
        self._refuse_unlike(
            f"{self._place(site)} and its float32 twin are not as far apart as {error_name(site)} of the floor says",
            expected=stored.double()[is_finite],
            found=measured.whole.sqrt()[is_finite],
        )

    def prove_router(self) -> None:
        """Check the golden's experts, and the stored noise on their scores, against its logits and their twin."""
        golden, layer, stored = self._reference, self._layer, self.statistic(ROUTER_NOISE)
        assert layer is not None, "a router is in a layer"
        twin, twin_choice = (
            golden.read_twin(layer, site) for site in (Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS)
        )
        margin, held = self.statistic(ROUTER_MARGIN), golden.sites(layer)
        if twin is None or stored is None or twin_choice is None or margin is None:
            return
        if Site.ROUTER_LOGITS not in held or Site.ROUTER_EXPERTS not in held:
            return
        logits = golden.read(layer, Site.ROUTER_LOGITS)
        scores, exact = (
            rank_without_bias(golden.graph, self._batch.rows(side, Site.ROUTER_LOGITS).float())
            for side in (logits, twin)
        )
        errors = (scores - exact).abs()
        places = competing_places(twin_choice.shape[-1], errors.shape[-1])
        self._prove_router_noise(errors, stored, num_competing=places.stop - places.start)
        experts, chosen = (
            self._batch.rows(side, Site.ROUTER_EXPERTS).sort(dim=-1).values
            for side in (golden.read(layer, Site.ROUTER_EXPERTS), twin_choice)
        )
        # Two scores err, on two sides; `margin` is the distance of the twin's k-th score from the next.
        wrong = (experts != chosen).any(dim=-1) & (margin > 2 * errors.amax(dim=-1) + _SCORE_SLACK)
        if bool(wrong.any()):
            token = int(wrong.nonzero()[0])
            raise self._changed(
                f"its router_experts of layer {layer} (layer_{layer}.safetensors, layer_{layer}.fp32.safetensors) do "
                "not follow from its logits",
                expected=f"experts {chosen[token].tolist()} at token {token}",
                found=str(experts[token].tolist()),
            )

    def _prove_router_noise(self, errors: torch.Tensor, stored: torch.Tensor, *, num_competing: int) -> None:
        """Check the stored noise [T]: the largest error among the scores that compete for the k-th place.

        Which these are depends on the correction bias, which a golden does not store; their number gives a range. If
        all experts are chosen, none compete, and the noise is 0. `errors` are |golden − twin| of all scores, [T,E].
        """
        smallest, largest = torch.zeros_like(stored), torch.zeros_like(stored)
        if num_competing:
            # The largest of n errors is at least the n-th smallest of all.
            smallest, largest = errors.kthvalue(num_competing, dim=-1).values, errors.amax(dim=-1)
        is_possible = (stored <= largest + _SCORE_SLACK) & (stored >= smallest - _SCORE_SLACK)
        if not bool(is_possible.all()):
            token = int((~is_possible).nonzero()[0])
            raise self._changed(
                f"{self._group}.floor.safetensors says another noise on the router's scores of layer {self._layer} "
                "than router_logits and their float32 twin",
                expected=f"from {float(smallest[token]):.3g} to {float(largest[token]):.3g} at token {token}",
                found=f"{float(stored[token]):.3g}",
            )

    def widened_squares(self, site: Site) -> Squares | None:
        """Return (golden or variant − twin)², the largest per token; None for a golden without variants."""
        for variant in self._variants:
            parts = read_squares(site, lambda name: self.statistic(variant_name(variant, name)))  # noqa: B023
            if parts is not None:
                self._prove_sums(site, parts, variant=variant)
        return read_squares(site, self.largest) if self._variants else None

    def variant_averages(self, site: Site) -> tuple[float, ...] | None:
        """Return each of `Structure.figures` as the variants' value over the golden's: the largest variant, at least 1.

        None if no variant was measured at the site.
        """
        stored = [self._read_floor(variant_name(variant, structure_name(site))) for variant in self._variants]
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

    def _read_floor(self, name: str) -> torch.Tensor | None:
        return self._reference.read_floor(self._layer, name)

    def _prove_not_empty(self, site: Site | ModelSite, parts: Squares) -> None:
        """Refuse stored distances of 0 for every token, in a BF16 golden whose values are not all 0."""
        if self._layer is None or not isinstance(site, Site):
            return
        entry = self._reference.entry(self._layer, site)
        # The l2 norm is 0 if all values are 0, and None if none is finite.
        if entry is None or not entry.statistics.l2 or bool(parts.whole.any()):
            return
        if not computes_in_float32(self._reference):
            raise self._changed(
                f"{self._group}.floor.safetensors says that BF16 cost nothing at {self._place(site)}",
                expected="a distance above 0 at some token",
                found="0 at all of them",
            )

    def _prove_sums(self, site: Site | ModelSite, parts: Squares, *, variant: str = "") -> None:
        """Refuse distances of the golden, or of a variant, whose `parts` do not add up to those of all channels."""
        name = error_name(site)
        stored = self.statistic(variant_name(variant, name) if variant else name)
        if stored is not None:
            of_variant = f" of variant {variant}" if variant else ""
            self._refuse_unlike(
                f"{ordinary_error_name(site)} and {massive_error_name(site)}{of_variant} do not add up to {name} at "
                f"{self._place(site)}",
                expected=stored.double(),
                found=parts.whole.sqrt(),
            )

    def _refuse_unlike(self, what: str, *, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Refuse distances per token [T] that are not the expected ones."""
        if not torch.allclose(found, expected, rtol=_TOLERANCE, atol=TINY_FLOAT32):
            group = self._group
            raise self._changed(
                f"{what} ({group}.safetensors, {group}.fp32.safetensors, {group}.floor.safetensors)",
                expected=f"a norm of {float(expected.norm()):.6g} over all tokens",
                found=f"{float(found.norm()):.6g}",
            )

    def _changed(self, what: str, *, expected: str, found: str) -> CaptureError:
        return CaptureError(
            f"the golden {self._reference.directory} was damaged or changed after it was made: {what}",
            expected=expected,
            found=found,
            next_step=_AGAIN,
        )

    @property
    def _group(self) -> str:
        return "model" if self._layer is None else f"layer_{self._layer}"

    def _place(self, site: Site | ModelSite) -> str:
        return str(site) if self._layer is None else f"{site} of layer {self._layer}"


def read_squares(site: Site | ModelSite, read: Callable[[str], torch.Tensor | None]) -> Squares | None:
    """Square a site's two error norms, [T] over ordinary and over massive channels; None if one is missing.

    `read` returns a statistic by its name, or None.
    """
    ordinary, massive = (read(name) for name in (ordinary_error_name(site), massive_error_name(site)))
    return None if ordinary is None or massive is None else Squares.of(ordinary=ordinary, massive=massive)
