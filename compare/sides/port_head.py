"""PortHeadGolden: a golden's final norm and logits, computed from the port's own last output.

The last output of a chained run carries the errors of all layers. Measured against this golden, the head shows its own
error alone.

PortInputGolden: a golden of one layer, computed on the port's own input.

A layer of a chained run inherits errors, and may choose other experts because of them. So the layer is computed again
from the checkpoint on the port's own input, in three ways:

- exactly: the float32 twin
- rounded as a golden rounds: the golden
- with random roundings: a variant, which widens the noise floor

The port's difference from this golden is the layer's own error, and the limits of isolated runs hold.
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
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.weight_names import CORRECTION_BIAS
from minimax_tools.reference.rounded_layer import RoundedLayer
from minimax_tools.reference.rounding import Float32Head, RoundingKind

# A golden's name for its first variant with random roundings.
_VARIANT = "random_1"  # a golden's name for its first variant with random roundings


class PortHeadGolden(Capture):
    """A capture whose final norm and logits are computed anew; all else is the golden's.

    `layer` is the last one; its output in `target` is finite on real tokens.
    """

    def __init__(
        self, golden: CaptureSource, target: CaptureSource, *, layer: int, weights: HeadWeights
    ) -> None:
        super().__init__(golden.directory, golden.manifest)
        self.is_natural = golden.is_natural
        inputs = golden.read_inputs()
        real = inputs.attention_mask.bool()
        output = target.read(layer, Site.OUTPUT).reshape(*inputs.batch_shape, -1)
        self._layer = layer
        # Padding may hold NaN.
        self._output = output.masked_fill(~real[..., None], 0.0)
        head = Float32Head(weights.norm, weights.lm_head, eps=weights.spec.rms_norm_eps)
        self._twin = head.run(self._output)
        # A float32 golden rounds nothing: its values are the twin's, and there is no floor.
        self._is_float32 = computes_in_float32(golden)
        self._rounded = self._twin if self._is_float32 else self._round(head)
        self._floor: dict[str, torch.Tensor] = {}
        if not self._is_float32:
            variant = head.run_randomly(self._output, seed=layer)
            for site, exact in self._twin.items():
                self._floor |= error_norms(site, self._rounded[site], exact, real=real)
                of_variant = error_norms(site, variant[site], exact, real=real)
                self._floor |= {variant_name(_VARIANT, name): norms for name, norms in of_variant.items()}

    def _round(self, head: Float32Head) -> Mapping[ModelSite, torch.Tensor]:
        """Compute both sites as a golden rounds: the norm before and after its weight, the logits at their end."""
        normed = head.normalise(self._output, rounds=True)
        return {ModelSite.FINAL_NORM: normed, ModelSite.LOGITS: head.score(normed).bfloat16()}

    @property
    def description(self) -> Description:
        """The golden's description; in BF16 with a full noise floor and one variant, since this class measures them."""
        if self._is_float32:
            return super().description
        return replace(super().description, noise_floor="full", floor_variants=(_VARIANT,))

    def read(self, layer: int, site: Site) -> torch.Tensor:
        """Read a site's tensor; the last layer's output is the port's."""
        is_last_output = (layer, site) == (self._layer, Site.OUTPUT)
        return self._output if is_last_output else super().read(layer, site)

    def model_sites(self) -> tuple[ModelSite, ...]:
        """Return the golden's sites outside the layers, and those computed here."""
        stored = super().model_sites()
        return tuple(site for site in ModelSite if site in stored or site in self._twin)

    def read_model(self, site: ModelSite) -> torch.Tensor:
        """Read a site's tensor, rounded as a golden rounds."""
        return self._rounded[site] if site in self._rounded else super().read_model(site)

    def read_model_twin(self, site: ModelSite) -> torch.Tensor | None:
        """Read a site's float32 twin; None in a float32 golden, whose values are the twin's."""
        if site in self._twin:
            return None if self._is_float32 else self._twin[site]
        return super().read_model_twin(site)

    def read_model_floor(self, name: str) -> torch.Tensor | None:
        """Read a floor statistic; a BF16 golden has those of final norm and logits alone."""
        if self._is_float32:
            return super().read_model_floor(name)
        return self._floor.get(name)


def on_port_output(sides: Sides, last_layer: int) -> Sides | None:
    """Return sides whose golden has its head computed from the port's own output of `last_layer`.

    None if no weights are known, the criteria are `classic` (fixed limits on outputs), or the golden is not mm2's own;
    also if the port's output is missing, not finite or equal to the golden's.

    Raises:
        IncomparableError: The weights are another model's.
        CheckpointError: They cannot be read.
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


# A golden keeps these in float32.
_FLOAT32_SITES = (Site.ROUTER_LOGITS, Site.ROUTER_WEIGHTS)
_VARIANT = "random_1"  # a golden's name for its first variant with random roundings


class PortInputGolden(Capture):
    """A capture of which one layer is computed anew; all else is the golden's.

    The layer's input in `target` is finite on real tokens; `weights` are in the dtype that the golden computed in.
    """

    def __init__(
        self, golden: CaptureSource, target: CaptureSource, *, layer: int, weights: GoldenWeights
    ) -> None:
        super().__init__(golden.directory, golden.manifest)
        self.is_natural = golden.is_natural
        inputs = golden.read_inputs()
        is_padding = inputs.attention_mask == 0
        # Padding may hold NaN, and zero times NaN is NaN.
        layer_input = target.read(layer, Site.INPUT).reshape(*inputs.batch_shape, -1)
        self._layer = layer
        self._input = layer_input.masked_fill(is_padding[..., None], 0.0)
        self._is_float32 = computes_in_float32(golden)
        # A float32 golden rounds nothing: it is its own twin, and has no floor.
        roundings = () if self._is_float32 else (RoundingKind.NEAREST, RoundingKind.RANDOM)
        kinds = (RoundingKind.EXACT, *roundings)
        # One result for each kind. `router_experts=None`: the layer chooses its experts anew.
        computed = RoundedLayer(weights.spec, weights.tensors, kinds=kinds, seed=layer).run(
            self._input, inputs, router_experts=None
        )
        self._twin = self._rounded = computed[0]
        self._floor: Mapping[str, torch.Tensor] = {}
        if not self._is_float32:
            _, self._rounded, variant = computed
            self._floor = self._measure_floor(variant, weights, inputs.attention_mask)

    @property
    def description(self) -> Description:
        """The golden's description; in BF16 with a full noise floor and one variant, since this file measures them."""
        if self._is_float32:
            return super().description
        return replace(super().description, noise_floor="full", floor_variants=(_VARIANT,))

    def sites(self, layer: int) -> tuple[Site, ...]:
        """Return the sites of a layer: every one of the computed layer."""
        return tuple(Site) if layer == self._layer else super().sites(layer)

    def read(self, layer: int, site: Site) -> torch.Tensor:
        """Read a site's tensor, rounded as a golden rounds."""
        if layer != self._layer:
            return super().read(layer, site)
        if site is Site.INPUT:
            return self._input
        value = self._rounded[site]
        is_kept = self._is_float32 or site in _FLOAT32_SITES or not value.is_floating_point()
        return value if is_kept else value.bfloat16()

    def read_twin(self, layer: int, site: Site) -> torch.Tensor | None:
        """Read a site's float32 twin."""
        if layer != self._layer or self._is_float32:
            return super().read_twin(layer, site)
        return self._twin.get(site)

    def read_floor(self, layer: int, name: str) -> torch.Tensor | None:
        """Read one of the layer's floor statistics."""
        if layer != self._layer or self._is_float32:
            return super().read_floor(layer, name)
        return self._floor.get(name)

    def _measure_floor(
        self, variant: Mapping[Site, torch.Tensor], weights: GoldenWeights, mask: torch.Tensor
    ) -> Mapping[str, torch.Tensor]:
        settings: dict[str, Any] = {
            "attention_mask": mask,
            "correction_bias": weights.tensors[CORRECTION_BIAS].float(),
            "num_experts_per_tok": weights.spec.num_experts_per_tok,
        }
        statistics = floor_statistics(self._rounded, self._twin, **settings)
        return statistics | variant_statistics(
            {_VARIANT: variant}, self._twin, golden=self._rounded, **settings
        )


def on_port_input(sides: Sides, layer: int) -> Sides | None:
    """Return sides whose golden has one layer computed on the port's own input of it.

    None if no weights are known, the classic limits judge (such as a cosine of 0.99), the golden is not mm2's own, or
    the port's input is missing or not finite.

    Raises:
        IncomparableError: The weights are another model's.
        CheckpointError: The weights cannot be read.
    """
    golden, source = sides.reference, sides.weights
    if source is None or sides.is_classic or golden.known_description is None:
        return None
    layer_inputs = sides.read_rows(layer, Site.INPUT)  # golden's and port's
    if layer_inputs is None or not bool(layer_inputs[1].isfinite().all()):
        return None
    with source.open_layer(layer, golden) as weights:
        return replace(sides, reference=PortInputGolden(golden, sides.target, layer=layer, weights=weights))
