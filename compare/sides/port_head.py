"""PortHeadGolden: a golden's final norm and logits, computed from the port's own last output.

The last output of a chained run carries the errors of all layers. Measured against this golden, the head shows its own
error alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from compare.limits.limit_context import computes_in_float32
from compare.noise.input_error import measure_input_error
from compare.sides.golden_weights import HeadWeights
from compare.sides.sides import Sides
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.metrics.noise_floor import error_norms, variant_name
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.reference.head import Float32Head

# A golden's name for its first variant with random roundings.
_VARIANT = "random_1"


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
