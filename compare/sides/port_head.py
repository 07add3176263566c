"""Goldens computed from the port's own values: a layer from its input, the head from the last output.

A chained run's values carry the errors of all parts before. Against a golden of its own input, a part shows its own
error alone, and the limits of isolated runs hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from compare.limits.limits import computes_in_float32
from compare.noise.rows import measure_input_error
from compare.sides.golden_weights import GoldenWeights, HeadWeights
from compare.sides.sides import Sides
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.metrics.noise_floor import error_norms, floor_statistics, variant_name, variant_statistics
from minimax_tools.model.router import Router
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.reference.rounded_layer import RoundedLayer
from minimax_tools.reference.rounding import Float32Head, Rounding, RoundingKind

# A golden's name for its first variant with random roundings.
_VARIANT = "random_1"


class _ComputedGolden(Capture):
    """A golden of which a part is computed anew, from the port's values of one site of `layer`.

    The part is computed exactly (the float32 twin), as a golden rounds, and with random roundings (a variant). The
    port's values are finite on real tokens; those of padding, which may be NaN, become 0.
    """

    def __init__(self, golden: CaptureSource, target: CaptureSource, *, layer: int, site: Site) -> None:
        super().__init__(golden.directory, golden.manifest)
        self.is_natural = golden.is_natural
        self._layer = layer
        inputs = golden.read_inputs()
        self._mask = inputs.attention_mask
        values = target.read(layer, site).reshape(*inputs.batch_shape, -1)
        self._given = values.masked_fill(self._mask[..., None] == 0, 0.0)
        # A float32 golden rounds nothing: it is its own twin, and has no floor.
        self._is_float32 = computes_in_float32(golden)
        self._floor: Mapping[str, torch.Tensor] = {}

    @property
    def description(self) -> Description:
        """The golden's description; in BF16 with the noise floor and the variant that are measured here."""
        if self._is_float32:
            return super().description
        return replace(super().description, noise_floor="full", floor_variants=(_VARIANT,))


class PortHeadGolden(_ComputedGolden):
    """A golden whose final norm and logits follow from the port's output of the last `layer`."""

    def __init__(
        self, golden: CaptureSource, target: CaptureSource, *, layer: int, weights: HeadWeights
    ) -> None:
        super().__init__(golden, target, layer=layer, site=Site.OUTPUT)
        head = Float32Head(weights.norm, weights.lm_head, spec=weights.spec)
        self._twin = head.run(self._given)
        self._rounded: Mapping[ModelSite, torch.Tensor] = self._twin
        if not self._is_float32:
            self._rounded = self._round(head)
            every_row = ((RoundingKind.RANDOM, slice(None)),)
            variant = head.run_rounded(self._given, Rounding(seed=layer), every_row)
            real = self._mask.bool()
            floor: dict[str, torch.Tensor] = {}
            for site, exact in self._twin.items():
                floor |= error_norms(site, self._rounded[site], exact, real=real)
                of_variant = error_norms(site, variant[site], exact, real=real)
                floor |= {variant_name(_VARIANT, name): norms for name, norms in of_variant.items()}
            self._floor = floor

    def _round(self, head: Float32Head) -> Mapping[ModelSite, torch.Tensor]:
        """Compute both sites as a golden rounds: the norm before and after its weight, the logits at their end."""
        every_row = ((RoundingKind.NEAREST, slice(None)),)
        rounded = head.run_rounded(self._given, Rounding(seed=0), every_row)
        return {site: values.bfloat16() for site, values in rounded.items()}

    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        """Read a site's tensor, rounded as a golden rounds; the last layer's output is the port's."""
        if isinstance(site, ModelSite) and site in self._rounded:
            return self._rounded[site]
        is_last_output = (layer, site) == (self._layer, Site.OUTPUT)
        return self._given if is_last_output else super().read(layer, site)

    def model_sites(self) -> tuple[ModelSite, ...]:
        """Return the golden's sites outside the layers, and those computed here."""
        stored = super().model_sites()
        return tuple(site for site in ModelSite if site in stored or site in self._twin)

    def read_twin(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor | None:
        """Read a site's float32 twin; None in a float32 golden, whose values are the twin's."""
        if isinstance(site, ModelSite) and site in self._twin:
            return None if self._is_float32 else self._twin[site]
        return super().read_twin(layer, site)

    def read_floor(self, layer: int | None, name: str) -> torch.Tensor | None:
        """Read a floor statistic; outside the layers, a BF16 golden has those of final norm and logits alone."""
        if layer is not None or self._is_float32:
            return super().read_floor(layer, name)
        return self._floor.get(name)


def on_port_output(sides: Sides, last_layer: int) -> Sides | None:
    """Return sides whose golden has its head computed from the port's own output of `last_layer`.

    None if no weights are known, the criteria are `classic` (fixed limits on outputs), or the golden is not mm2's own;
    also if the port's output is missing, not finite or equal to the golden's.
    """
    golden, source = sides.reference, sides.weights
    if source is None or sides.is_classic or golden.known_description is None:
        return None
    outputs = sides.read_rows(last_layer, Site.OUTPUT)
    if outputs is None:
        return None
    golden_output, port_output = outputs
    if (
        not bool(port_output.isfinite().all())
        or measure_input_error(golden_output, port_output).overall == 0.0
    ):
        return None
    with source.open_head(golden) as weights:
        return replace(
            sides, reference=PortHeadGolden(golden, sides.target, layer=last_layer, weights=weights)
        )


class PortInputGolden(_ComputedGolden):
    """A golden of which one layer is computed on the port's own input, choosing its experts anew.

    `weights` are in the dtype that the golden computed in.
    """

    def __init__(
        self, golden: CaptureSource, target: CaptureSource, *, layer: int, weights: GoldenWeights
    ) -> None:
        super().__init__(golden, target, layer=layer, site=Site.INPUT)
        roundings = () if self._is_float32 else (RoundingKind.NEAREST, RoundingKind.RANDOM)
        rounded_layer = RoundedLayer(
            weights.spec, weights.tensors, kinds=(RoundingKind.EXACT, *roundings), seed=layer
        )
        computed = rounded_layer.run(self._given, golden.read_inputs(), router_experts=None)
        self._twin = self._rounded = computed[0]
        if not self._is_float32:
            _, self._rounded, variant = computed
            self._floor = self._measure_floor(variant, weights)

    def sites(self, layer: int) -> tuple[Site, ...]:
        """Return the sites of a layer: every one of the computed layer."""
        if layer != self._layer:
            return super().sites(layer)
        return tuple(site for site in Site if site is Site.INPUT or site in self._twin)

    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        """Read a site's tensor, rounded as a golden rounds."""
        if layer != self._layer or isinstance(site, ModelSite):
            return super().read(layer, site)
        if site is Site.INPUT:
            return self._given
        value = self._rounded[site]
        graph = self.graph
        of_router = {
            Site.ROUTER_LOGITS: graph.has_float32_router,
            Site.ROUTER_WEIGHTS: graph.has_float32_shares,
        }
        is_kept = self._is_float32 or of_router.get(site, False) or not value.is_floating_point()
        return value if is_kept else value.bfloat16()

    def read_twin(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor | None:
        """Read a site's float32 twin."""
        if layer != self._layer or isinstance(site, ModelSite) or self._is_float32:
            return super().read_twin(layer, site)
        return self._twin.get(site)

    def read_floor(self, layer: int | None, name: str) -> torch.Tensor | None:
        """Read one of the layer's floor statistics."""
        if layer != self._layer or self._is_float32:
            return super().read_floor(layer, name)
        return self._floor.get(name)

    def _measure_floor(
        self, variant: Mapping[Site, torch.Tensor], weights: GoldenWeights
    ) -> Mapping[str, torch.Tensor]:
        settings: dict[str, Any] = {
            "attention_mask": self._mask,
            "router": Router.of(weights.spec, weights.tensors),
        }
        statistics = floor_statistics(self._rounded, self._twin, **settings)
        return statistics | variant_statistics(
            {_VARIANT: variant}, self._twin, golden=self._rounded, **settings
        )


def on_port_input(sides: Sides, layer: int) -> Sides | None:
    """Return sides whose golden has one layer computed on the port's own input of it.

    None if no weights are known, the classic limits judge (such as a cosine of 0.99), the golden is not mm2's own, or
    the port's input is missing or not finite.
    """
    golden, source = sides.reference, sides.weights
    if source is None or sides.is_classic or golden.known_description is None:
        return None
    layer_inputs = sides.read_rows(layer, Site.INPUT)  # golden's and port's
    if layer_inputs is None or not bool(layer_inputs[1].isfinite().all()):
        return None
    with source.open_layer(layer, golden) as weights:
        return replace(sides, reference=PortInputGolden(golden, sides.target, layer=layer, weights=weights))
