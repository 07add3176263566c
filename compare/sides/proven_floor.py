"""Proven floor: the golden's error at a site from its own value and its twin, held against the distances it stored.

The golden stores what BF16 cost it twice: as a float32 twin, and as distances per token. A golden whose value, twin or
distances were changed after it was made no longer agrees with itself, whatever digests it was given.
T real tokens.
"""

from __future__ import annotations

import torch

from compare.limits.limit_context import computes_in_float32
from compare.noise.squared_errors import TINY_FLOAT32, Squares
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import CaptureError
from minimax_tools.metrics.noise_floor import error_name, massive_error_name, ordinary_error_name
from minimax_tools.model.sites import ModelSite, Site

# The stored distances are float32 sums in another order: 6e-7 were measured at 6144 channels, 2e-5 at 200 064.
_TOLERANCE = 1e-3
# Biased scores are float32 of about 1 to 10.
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
    """Refuse a golden whose stored distances are not those from its value to its twin.

    Args:
        golden: The golden.
        layer: The layer; None outside the layers.
        site: The site.
        measured: (golden − twin)² summed per token.
        stored: The distances of the same tokens, [T]; None where there are none, though it kept a twin.

    Raises:
        CaptureError: They are others, or none.
    """
    if stored is None:
        group = _group(layer)
        raise CaptureError(
            f"the golden {golden.directory} is damaged: {group}.floor.safetensors holds no {error_name(site)}, and "
            f"{group}.fp32.safetensors a float32 twin of {_place(site, layer)}",
            next_step=_AGAIN,
        )
    # A golden's NaN is refused where its values are judged.
    is_finite = measured.whole.isfinite()
    _refuse_unlike(
        golden,
        f"{_place(site, layer)} and its float32 twin are not as far apart as {error_name(site)} of the floor says",
        layer,
        expected=stored.double()[is_finite],
        found=measured.whole.sqrt()[is_finite],
    )


def refuse_torn_floor(
    golden: CaptureSource,
    layer: int | None,
    site: Site | ModelSite,
    *,
    parts: Squares,
    stored: torch.Tensor | None,
    variant: str | None = None,
) -> None:
    """Refuse a golden whose ordinary and massive distances do not add up to those over all channels.

    Args:
        golden: The golden.
        layer: The layer; None outside the layers.
        site: The site.
        parts: The squared distances per token over ordinary and over massive channels.
        stored: The distances over all channels, [T]; None where there are none.
        variant: The variant that the distances are of; None for the golden itself.

    Raises:
        CaptureError: They are not.
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
    """Refuse a BF16 golden that says that its rounding cost nothing at any token.

    Args:
        golden: The golden.
        layer: The layer.
        site: The site.
        parts: The squared distances per token that it stored.

    Raises:
        CaptureError: It does.
    """
    entry = golden.entry(layer, site)
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
    """Refuse a golden whose stored router noise is not that of some of its scores.

    Which scores compete hangs on the correction bias, which a golden does not hold: the noise is the largest error of
    `num_competing` of them.

    Args:
        golden: The golden.
        layer: The layer.
        errors: |golden − twin| of every expert's score, [T,E].
        stored: The noise that the golden stored, [T].
        num_competing: How many scores compete; none where all experts are chosen.

    Raises:
        CaptureError: It is not.
    """
    smallest, largest = torch.zeros_like(stored), torch.zeros_like(stored)
    if num_competing:
        smallest, largest = errors.kthvalue(num_competing, dim=-1).values, errors.amax(dim=-1)
    is_possible = (stored <= largest + _SCORE_SLACK) & (stored >= smallest - _SCORE_SLACK)
    if not bool(is_possible.all()):
        token = int((~is_possible).nonzero()[0])
        raise _changed(
            golden,
            f"layer_{layer}.floor.safetensors says another noise on the router's scores of layer {layer} than "
            "router_logits and their float32 twin",
            expected=f"from {float(smallest[token]):.3g} to {float(errors[token].max()):.3g} at token {token}",
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
    """Refuse a golden that chose other experts than its twin though the scores are far apart.

    Args:
        golden: The golden.
        layer: The layer.
        experts: Those that it chose, [T,k].
        chosen: Those that its twin chose, [T,k].
        errors: |golden − twin| of every expert's score, [T,E].
        margin: How far the twin's k-th score is above the next, [T].

    Raises:
        CaptureError: It chose others elsewhere.
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
