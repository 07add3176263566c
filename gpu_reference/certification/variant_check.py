"""The check of a noise floor's variants.

A variant is another correct way to compute a layer in BF16; it widens the noise floor. A wrong variant would widen the
floor too far, and hide faults of ports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from gpu_reference.certification.check_tally import Worst
from gpu_reference.certification.golden_checks import bf16_limit
from minimax_tools.capture.manifest import Check, Outcome
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CaptureError
from minimax_tools.metrics.noise_floor import error_name, token_rows, variant_name
from minimax_tools.model.sites import Site

_NAME = "floor_variants"


@dataclass(frozen=True, slots=True, kw_only=True)
class _VariantError:
    """The distance of a variant from the float32 twin, at a site of a layer."""

    where: str  # site, layer and variant, in words
    distance: float  # distance relative to the golden's values; absolute if these are all 0
    limit: float  # largest distance that BF16 explains
    widening: float  # distance in units of the golden's own error; 1 if both compute the same


def check_variants(capture: Capture) -> tuple[Check, ...]:
    """Check that no variant is further from the float32 twin than BF16 explains; () for a golden without variants."""
    if not capture.description.floor_variants:
        return ()
    try:
        errors = [error for layer in capture.layers for error in _measure_layer(capture, layer)]
    except CaptureError as damage:
        return (Check(name=_NAME, outcome=Outcome.FAILED, found=str(damage)),)
    worst = Worst(name=_NAME, missing="the golden stored no site that a variant changes")
    for error in errors:
        worst.add(error.distance, error.limit, error.where)
    check = worst.check("variants are off the float32 layer")
    if not errors:
        return (check,)
    widest = max(errors, key=lambda error: error.widening)
    found = f"{check.found}; they widen the floor up to {widest.widening:.3g} times, at {widest.where}"
    if check.outcome is Outcome.FAILED:
        found += "; make the golden with --floor-variants 0"
    return (replace(check, found=found),)


def _measure_layer(capture: Capture, layer: int) -> Iterator[_VariantError]:
    real = capture.read_kept_mask()
    for site in capture.sites(layer):
        golden_floor = capture.read_floor(layer, error_name(site))
        if golden_floor is None:
            # The site has no floor, as the chosen experts.
            continue
        golden_norm = float(token_rows(capture.read(layer, site), site)[real].float().norm())
        for variant in capture.description.floor_variants:
            error = _read_error(capture, layer, variant, site)
            variant_error, golden_error = float(error[real].norm()), float(golden_floor[real].norm())
            yield _VariantError(
                where=f"{site} of layer {layer} ({variant})",
                distance=variant_error / golden_norm if golden_norm else variant_error,
                limit=bf16_limit(site),
                widening=variant_error / golden_error if golden_error else 1.0,
            )


def _read_error(capture: Capture, layer: int, variant: str, site: Site) -> torch.Tensor:
    name = variant_name(variant, error_name(site))
    error = capture.read_floor(layer, name)
    if error is None:
        raise CaptureError(f"the floor of layer {layer} holds no {name}", next_step="Run the capture again.")
    return error
