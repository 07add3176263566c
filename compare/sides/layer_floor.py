"""LayerFloor: a layer's noise floor (what BF16 alone costs the golden), as the golden stored it.

The names of the stored statistics are listed in minimax_tools/metrics/noise_floor.py. Variants are other right ways to
round the layer; their distances from the float32 twin widen the floor.
T real tokens of the batch, F channels of a site. Rows are tokens here: `Batch.rows` gives [T,F].

Proven floor: refusals of a golden whose stored noise floor does not agree with its own values.

A golden stores its BF16 error twice: as a float32 twin beside its value, and as distances ‖value − twin‖ per token. If
a value, a twin or a distance is changed after it was made, the two disagree, whatever digests the golden was given.
T real tokens, E experts, k experts per token.
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
from minimax_tools.model.sites import ModelSite, Site

# Relative. Stored distances are float32 sums in another order: off by 6e-7 with 6144 channels, 2e-5 with 200 064.
_TOLERANCE = 1e-3
# Absolute. Biased scores are float32 numbers from about 1 to 10, so this is a few roundings.
_SCORE_SLACK = 2e-6
_AGAIN = "Copy the golden again from where it was made, or make it again: mm2-gpu extract-all."


def refuse_other_floor(
    golden: CaptureSource,
    layer: int | None,
    site: Site | ModelSite,
    *,
    measured: Squares,
    stored: torch.Tensor | None,
) -> None:
    """Refuse a golden that stored other distances [T] than `measured`, or none (None) beside its twin.

    `measured` is (golden − twin)² summed per token; `layer` is None for a site outside the layers.

    Raises:
        CaptureError: The golden stored other distances, or none.
    """
    if stored is None:
        group = _group(layer)
        raise CaptureError(
            f"the golden {golden.directory} is damaged: {group}.floor.safetensors holds no {error_name(site)}, and "
            f"{group}.fp32.safetensors a float32 twin of {_place(site, layer)}",
            next_step=_AGAIN,
        )
    # NaN in the golden is refused later, when its values are judged.
    is_finite = measured.whole.isfinite()
    _refuse_unlike(
        golden,
        f"{_place(site, layer)} and its float32 twin are not as far apart as {error_name(site)} of the floor says",
        layer,
        expected=stored.double()[is_finite],
        found=measured.whole.sqrt()[is_finite],
    )


def refuse_wrong_sums(
    golden: CaptureSource,
    layer: int | None,
    site: Site | ModelSite,
    *,
    parts: Squares,
    stored: torch.Tensor | None,
    variant: str | None = None,
) -> None:
    """Refuse a golden whose distances over ordinary and massive channels do not add up to those over all channels.

    `parts` are the squared distances over ordinary and over massive channels, `stored` the distances over all channels,
    [T]; None for `stored` passes. Both are of the golden, or of the variant that `variant` names.

    Raises:
        CaptureError: They do not add up.
    """
    if stored is None:
        return
    of_variant = f" of variant {variant}" if variant else ""
    _refuse_unlike(
        golden,
        f"{ordinary_error_name(site)} and {massive_error_name(site)}{of_variant} do not add up to "
        f"{error_name(site)} at {_place(site, layer)}",
        layer,
        expected=stored.double(),
        found=parts.whole.sqrt(),
    )


def refuse_empty_floor(golden: CaptureSource, layer: int, site: Site, *, parts: Squares) -> None:
    """Refuse a BF16 golden that stored a distance of 0 for every token, though its values are not all 0.

    Raises:
        CaptureError: All stored distances, squared in `parts`, are 0.
    """
    entry = golden.entry(layer, site)
    # The l2 norm is 0 if all values are 0, and None if none is finite.
    if entry is None or computes_in_float32(golden) or not entry.statistics.l2 or bool(parts.whole.any()):
        return
    raise _changed(
        golden,
        f"layer_{layer}.floor.safetensors says that BF16 cost nothing at {site} of layer {layer}",
        expected="a distance above 0 at some token",
        found="0 at all of them",
    )


def refuse_other_router_noise(
    golden: CaptureSource, layer: int, *, errors: torch.Tensor, stored: torch.Tensor, num_competing: int
) -> None:
    """Refuse a golden whose stored router noise cannot come from its scores.

    The noise is the largest error among the scores that compete for the k-th place. Which scores these are depends on
    the correction bias, which a golden does not store; only their number is known, and so a range for the noise.
    `errors` [T,E] are |golden − twin| of every expert's score, `stored` [T] is the noise.

    Raises:
        CaptureError: The noise of a token lies outside its range.
    """
    # If all experts are chosen, none compete, and the noise is 0.
    smallest, largest = torch.zeros_like(stored), torch.zeros_like(stored)
    if num_competing:
        # The largest of n errors is at least the n-th smallest of all.
        smallest, largest = errors.kthvalue(num_competing, dim=-1).values, errors.amax(dim=-1)
    is_possible = (stored <= largest + _SCORE_SLACK) & (stored >= smallest - _SCORE_SLACK)
    if not bool(is_possible.all()):
        token = int((~is_possible).nonzero()[0])
        raise _changed(
            golden,
            f"layer_{layer}.floor.safetensors says another noise on the router's scores of layer {layer} than "
            "router_logits and their float32 twin",
            expected=f"from {float(smallest[token]):.3g} to {float(largest[token]):.3g} at token {token}",
            found=f"{float(stored[token]):.3g}",
        )


def refuse_other_choice(
    golden: CaptureSource,
    layer: int,
    experts: torch.Tensor,
    chosen: torch.Tensor,
    *,
    errors: torch.Tensor,
    margin: torch.Tensor,
) -> None:
    """Refuse a golden that chose other experts [T,k] than its twin (`chosen`), though the scores are far apart.

    Raises:
        CaptureError: A token's choice differs, and its `margin` [T], the distance of the twin's k-th score from the
            next, is more than twice the largest of its `errors` [T,E]: two scores err, on two sides.
    """
    is_other = (experts.sort(dim=-1).values != chosen.sort(dim=-1).values).any(dim=-1)
    wrong = is_other & (margin > 2 * errors.amax(dim=-1) + _SCORE_SLACK)
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise _changed(
            golden,
            f"its router_experts of layer {layer} (layer_{layer}.safetensors, layer_{layer}.fp32.safetensors) do not "
            "follow from its logits",
            expected=f"experts {sorted(chosen[token].tolist())} at token {token}",
            found=str(sorted(experts[token].tolist())),
        )


def _refuse_unlike(
    golden: CaptureSource, what: str, layer: int | None, *, expected: torch.Tensor, found: torch.Tensor
) -> None:
    """Refuse distances per token [T] that are not the expected ones."""
    if not torch.allclose(found, expected, rtol=_TOLERANCE, atol=TINY_FLOAT32):
        group = _group(layer)
        raise _changed(
            golden,
            f"{what} ({group}.safetensors, {group}.fp32.safetensors, {group}.floor.safetensors)",
            expected=f"a norm of {float(expected.norm()):.6g} over all tokens",
            found=f"{float(found.norm()):.6g}",
        )


def _changed(golden: CaptureSource, what: str, *, expected: str, found: str) -> CaptureError:
    return CaptureError(
        f"the golden {golden.directory} was damaged or changed after it was made: {what}",
        expected=expected,
        found=found,
        next_step=_AGAIN,
    )


def _group(layer: int | None) -> str:
    return "model" if layer is None else f"layer_{layer}"


def _place(site: Site | ModelSite, layer: int | None) -> str:
    return str(site) if layer is None else f"{site} of layer {layer}"


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
