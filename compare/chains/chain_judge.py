"""ChainJudge: judges the output at the end of a chain of layers, which began with the golden's input.

A layer that ran alone is judged by its noise floor, a chain by the limits of its length (see `chain_limits`).
The judge also tells how small an error it would have seen. `visible` is the smallest noise on every token that breaks a
limit, relative to the token's output without its massive channels. It holds for noise at the chain's end: the layers
behind a mistake change the size of its error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compare.chains.chain_limits import chain_limits
from compare.chains.chain_noise import PARTS, ChainError, measure_error, measure_unit
from compare.judging.layer_judge import LayerJudge
from compare.limits.criteria import Criteria
from compare.limits.limit_context import computes_in_float32
from compare.limits.limits import RATIO_FIGURES
from compare.sides.batch import Batch
from compare.sides.captured_input import CapturedInput
from compare.sides.sides import Sides
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.metrics.noise_floor import error_name, massive_channels
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.results.probes import Chain
from minimax_tools.results.results import SiteResult, SiteStatus

# Usual difference of two right implementations of a layer, relative to its output, for a golden without a floor. The
# limits of chains were measured in this unit.
_LAYER_ERROR, _LAYER_ERROR_FLOAT32 = 1.5e-2, 5e-6


class ChainJudge:
    """Judges outputs of layers, alone or chained, against a golden; `criteria` are those for a layer that ran alone."""

    def __init__(self, golden: Capture, *, criteria: Criteria) -> None:
        self._golden = golden
        # `visible` is a size of noise: limits on averages, which show less than noise, would make it smaller. The more
        # figures are judged, the wider are the limits; any layer may come to be judged, so those of all are counted.
        self._criteria = replace(
            criteria,
            noise=criteria.noise.of_noise_alone(),
            num_figures=max(len(golden.layers), 1) * len(RATIO_FIGURES),
        )
        self._batch = Batch.of(golden, golden)

    def judge(self, span: Span, output: torch.Tensor) -> Chain:
        """Judge the output of the chain `span`, of at most `LONGEST_CHAIN` layers.

        The output is its last layer's, [B,S,H] on the CPU (B batch, S sequence, H hidden).

        Raises:
            IncomparableError: The golden holds NaN or Inf on a real token.
            CaptureError: The golden cannot be read.
        """
        return self._judge_single(span, output) if len(span) == 1 else self._judge_chain(span, output)

    def _judge_single(self, span: Span, output: torch.Tensor) -> Chain:
        result = self._judge_site(span.last, Site.OUTPUT, output)
        if not result.status.is_compared:
            raise IncomparableError(
                f"the output of layer {span.last} cannot be judged: {result.reason}",
                expected=" or ".join((SiteStatus.PASS, SiteStatus.WARN, SiteStatus.FAIL)),
                found=result.status,
                next_step="Make a golden of more tokens, on other prompts.",
            )
        is_right = result.status is not SiteStatus.FAIL
        return Chain(
            span=span,
            is_right=is_right,
            excess=_excess(result),
            visible=self._visible_alone(span.last, Site.OUTPUT, dtype=output.dtype),
            reason="" if is_right else result.reason,
        )

    def _judge_site(self, layer: int, site: Site, tensor: torch.Tensor) -> SiteResult:
        """Judge one site of a layer that ran on the golden's input as a comparison of two captures does."""
        target = _OneSiteSource(layer=layer, site=site, tensor=tensor)
        sides = Sides(reference=self._golden, target=target, batch=self._batch, criteria=self._criteria)
        return LayerJudge(sides, layer=layer, layer_input=CapturedInput(known=(Site.INPUT,))).judge(site)

    def _judge_chain(self, span: Span, output: torch.Tensor) -> Chain:
        reference = self._batch.rows(self._golden.read(span.last, Site.OUTPUT), Site.OUTPUT)
        target = self._batch.rows(output, Site.OUTPUT)
        if not bool(reference.isfinite().all()):
            raise IncomparableError(
                f"the golden's output of layer {span.last} holds NaN or Inf on real tokens",
                next_step="Make the golden again: no port can be judged by this one.",
            )
        limits = chain_limits(len(span), reference.dtype)
        # Errors are counted in what BF16 costs the chain's layers one by one, added up.
        unit = measure_unit(self._golden, span, batch=self._batch, layer_error=self._layer_error)
        # Noise as large as the output itself, to see how far it exceeds the limits.
        noise = reference.masked_fill(massive_channels(reference), 0.0)
        visible = _invert(measure_error(reference, reference + noise, unit).excess(limits))
        num_nonfinite = int((~target.isfinite()).sum())
        if num_nonfinite:
            reason = f"{num_nonfinite} NaN or Inf on real tokens"
            return Chain(span=span, is_right=False, excess=math.inf, visible=visible, reason=reason)
        error = measure_error(reference, target, unit)
        excess = error.excess(limits)
        reason = "" if excess <= 1.0 else _describe(error, limits)
        return Chain(span=span, is_right=excess <= 1.0, excess=excess, visible=visible, reason=reason)

    @property
    def _layer_error(self) -> float:
        return _LAYER_ERROR_FLOAT32 if computes_in_float32(self._golden) else _LAYER_ERROR

    def _visible_alone(self, layer: int, site: Site, *, dtype: torch.dtype) -> float:
        """Return the smallest noise that breaks a limit at a site of a layer that runs alone, relative to its output.

        The port is taken to have no other error; with one, less noise breaks the limit.
        """
        output = self._golden.read(layer, Site.OUTPUT)
        massive = massive_channels(self._batch.rows(output, Site.OUTPUT))
        noise = output.masked_fill(massive, 0.0)
        result = self._judge_site(layer, site, (self._golden.read(layer, site) + noise).to(dtype))
        visible = _invert(_excess(result))
        if result.noise is None or result.nearest is None or not result.noise.is_estimated:
            return visible
        # Without a twin, ρ² is estimated as error² − 1: the noise must make up for the 1 first.
        return visible * math.sqrt(1.0 + 1.0 / result.nearest.limit**2)

    def sweep_visible(self, span: Span) -> float | None:
        """Return the smallest noise in the MoE's delta that isolated runs would see in every layer of `span`.

        It is a share of the layer's output; None if the golden kept no floor of that site.
        """
        sizes = []
        for layer in span:
            if self._golden.read_floor(layer, error_name(Site.MOE_DELTA)) is None:
                return None
            dtype = self._golden.read(layer, Site.MOE_DELTA).dtype
            sizes.append(self._visible_alone(layer, Site.MOE_DELTA, dtype=dtype))
        return max(sizes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OneSiteSource(CaptureSource):
    """A capture source that holds one site of one layer, in memory."""

    layer: int
    site: Site
    tensor: torch.Tensor
    directory: Path = Path()

    @property
    def layers(self) -> tuple[int, ...]:
        return (self.layer,)

    def sites(self, layer: int) -> tuple[Site, ...]:
        return (self.site,) if layer == self.layer else ()

    def model_sites(self) -> tuple[ModelSite, ...]:
        return ()

    def read(self, layer: int, site: Site) -> torch.Tensor:
        if site not in self.sites(layer):
            raise CaptureError(f"there is no {site} of layer {layer}: only {self.site} of layer {self.layer}")
        return self.tensor

    def read_model(self, site: ModelSite) -> torch.Tensor:
        raise CaptureError(f"there is no {site}: only {self.site} of layer {self.layer}")

    def read_attention_mask(self) -> torch.Tensor | None:
        return None


def _excess(result: SiteResult) -> float:
    """Return the error of a layer that ran alone, in units of the limit that is nearest or broken furthest."""
    # An output with NaN or Inf is nearest to no limit.
    return math.inf if result.nearest is None else result.nearest.excess


def _invert(excess: float) -> float:
    """Return the largest noise that passes, from the excess of noise as large as the output.

    The excess grows in proportion to the noise, since the units of the limits do not depend on the target.
    """
    return 1.0 / excess if excess > 0.0 else math.inf


def _describe(error: ChainError, limits: ChainError) -> str:
    part = error.worst_part(limits)
    value, limit = getattr(error, part), getattr(limits, part)
    return f"error {PARTS[part]} {value:.3g}× what BF16 costs the layers one by one, limit {limit:.3g}"
