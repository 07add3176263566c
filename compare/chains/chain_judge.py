"""ChainJudge: judges the output at the end of a chain of layers, which began with the golden's input.

The error there is counted in units of what BF16 alone costs the layers one by one:

    unit² = sum over the chain's layers of 2 · floor², the squared difference of two right implementations of the layer

In fact layers amplify the error that they inherit, and a flip (a token sent to other experts) adds one that no floor
foretells. So right ports exceed the unit, the more the longer the chain is: `chain_limits` tells by how much.
A chain of one layer is judged by its noise floor. T judged tokens, F channels of the output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from compare.judging.layer_judge import LayerJudge
from compare.limits.criteria import Criteria
from compare.limits.limits import RATIO_FIGURES, computes_in_float32
from compare.limits.tolerances import LONGEST_CHAIN
from compare.noise.rows import TINY, Squares, square_difference, square_rows
from compare.sides.captured_input import CapturedInput
from compare.sides.layer_floor import LayerFloor
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.proof import name_place
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.metrics.noise_floor import error_name, massive_channels
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.results.probes import Chain
from minimax_tools.results.results import SiteResult, SiteStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainError:
    """The error at the end of a chain, in the unit of this module.

    The first four are quantiles over the tokens, of the error in the ordinary channels. In right ports too a few tokens
    have large errors, so no limit is on the worst.
    """

    lower_quartile: float
    median: float
    upper_quartile: float
    ninth_decile: float
    massive: float  # error over all tokens in the massive channels

    def excess(self, limits: ChainError) -> float:
        """Return the largest of its parts, each in units of its limit."""
        return max(float(getattr(self, name) / getattr(limits, name)) for name in PARTS)

    def worst_part(self, limits: ChainError) -> str:
        """Return the name of the part that is largest in units of its limit."""
        return max(PARTS, key=lambda name: getattr(self, name) / getattr(limits, name))

    def times(self, factor: float) -> ChainError:
        """Return this error times a factor."""
        return ChainError(**{name: factor * getattr(self, name) for name in PARTS})


# The parts of a `ChainError`, in words.
PARTS: Mapping[str, str] = MappingProxyType(
    {
        "lower_quartile": "of three tokens in four",
        "median": "of every second token",
        "upper_quartile": "of one token in four",
        "ninth_decile": "of one token in ten",
        "massive": "of the massive channels",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainUnit:
    """The unit at the end of one chain, per token."""

    squares: Squares  # the unit squared, [T]
    norms: Squares  # squared norms of the golden's output there, [T]

    @property
    def relative(self) -> float:
        """The unit of the median token relative to its output, in the ordinary channels."""
        return float((self.squares.ordinary / self.norms.ordinary.clamp(min=TINY)).sqrt().median())


def measure_unit(golden: CaptureSource, span: Span, *, batch: Batch, layer_error: float) -> ChainUnit:
    """Measure the unit at the end of the chain `span`.

    For a golden without a floor, `layer_error` is the usual difference of two right implementations of a layer,
    relative to its output.
    """
    total = _floor(golden, span.start, batch=batch, layer_error=layer_error)
    for layer in range(span.start + 1, span.stop):
        total = total.plus(_floor(golden, layer, batch=batch, layer_error=layer_error), factor=1.0)
    # Twice each floor: two right implementations each have an error of that size.
    return ChainUnit(squares=total.times(2.0), norms=_norms(golden, span.last, batch=batch))


def measure_error(reference: torch.Tensor, target: torch.Tensor, unit: ChainUnit) -> ChainError:
    """Measure the error of a chain's output, both [T,F] and finite."""
    massive = massive_channels(reference)
    error = square_difference(reference, target, massive=massive)
    ordinary = unit.squares.ordinary
    # A token whose own unit is below the median token's is judged by the median.
    tokens = (error.ordinary / torch.maximum(ordinary, ordinary.median()).clamp(min=TINY)).sqrt()
    shares = torch.tensor((0.25, 0.5, 0.75, 0.9), dtype=tokens.dtype)
    lower, median, upper, ninth = torch.quantile(tokens, shares).tolist()
    total = float(unit.squares.massive.sum())
    return ChainError(
        lower_quartile=lower,
        median=median,
        upper_quartile=upper,
        ninth_decile=ninth,
        massive=float((error.massive.sum() / total).sqrt()) if total > TINY else 0.0,
    )


def _floor(golden: CaptureSource, layer: int, *, batch: Batch, layer_error: float) -> Squares:
    """Return the squared noise floor of a layer's output; without one, the square of the usual error of a layer.

    Raises:
        CaptureError: The stored floor does not fit the golden's own values.
    """
    floor = LayerFloor(golden, batch, layer=layer)
    squares = floor.squares(Site.OUTPUT)
    if squares is not None:
        twin = golden.read_twin(layer, Site.OUTPUT)
        if twin is not None:
            # Measured only to refuse a stored floor that the golden's own values contradict.
            rows, exact = (batch.rows(side, Site.OUTPUT) for side in (golden.read(layer, Site.OUTPUT), twin))
            floor.prove(Site.OUTPUT, square_difference(exact, rows, massive=massive_channels(rows)))
        return squares
    # Half of its square, since `measure_unit` adds it twice.
    return _norms(golden, layer, batch=batch).times(layer_error**2 / 2)


def _norms(golden: CaptureSource, layer: int, *, batch: Batch) -> Squares:
    """Return the squared norms of a layer's output."""
    rows = batch.rows(golden.read(layer, Site.OUTPUT), Site.OUTPUT)
    return square_rows(rows, massive=massive_channels(rows))


# Largest errors of right ports in 8,400 chains, which begin at every layer of nine synthetic models; measured by
# scripts/bench_chained_ends.py with its default settings. A line for each length, from 1 to `LONGEST_CHAIN` layers,
# with the fields of `ChainError`: lower quartile, median, upper quartile and ninth decile of tokens, massive channels.
_LARGEST_ERRORS = (
    (0.640, 0.726, 0.833, 1.01, 0.714),
    (0.938, 2.39, 8.64, 23.0, 2.07),
    (3.73, 12.2, 23.0, 31.7, 4.11),
    (12.8, 24.4, 38.2, 53.6, 4.11),
    (27.8, 39.4, 53.8, 71.1, 4.11),
    (33.2, 44.9, 60.1, 83.4, 4.40),
    (38.5, 51.1, 74.7, 93.5, 7.33),
    (42.9, 58.8, 82.5, 97.7, 9.09),
)
# A limit is this many times the largest error measured: right ports on other models may have larger ones.
_MARGIN = 2.0
# Default lengths. A longer chain needs fewer runs, and its wider limits let larger mistakes pass. In BF16 the limits of
# two layers let an error below 2 % of the output pass, three layers 8 %, four a third. Limits in float32 do not widen.
_DEFAULT_IN_BFLOAT16, _DEFAULT_IN_FLOAT32 = 2, LONGEST_CHAIN


def chain_limits(length: int, dtype: torch.dtype) -> ChainError:
    """Return the limits at the end of a chain of `length` layers, at most `LONGEST_CHAIN`.

    If the golden computed in float32, they are those of one layer for any length: noise flips hardly an expert and does
    not grow. Right ports stayed below 0.4 of the unit up to the longest chain.
    """
    errors = _LARGEST_ERRORS[0 if dtype is torch.float32 else length - 1]
    return ChainError(**dict(zip(PARTS, errors, strict=True))).times(_MARGIN)


def default_chain_length(dtype: torch.dtype) -> int:
    """Return the default number of layers of a chain, for a golden that computed in `dtype`."""
    return _DEFAULT_IN_FLOAT32 if dtype is torch.float32 else _DEFAULT_IN_BFLOAT16


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
        """Return the smallest noise in the last delta that isolated runs would see in every layer of `span`.

        It is a share of the layer's output; None if the golden kept no floor of that site.
        """
        sizes = []
        for layer in span:
            site = self._golden.graph.layer(layer).last_delta
            if self._golden.read_floor(layer, error_name(site)) is None:
                return None
            dtype = self._golden.read(layer, site).dtype
            sizes.append(self._visible_alone(layer, site, dtype=dtype))
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

    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        if (layer, site) != (self.layer, self.site):
            place = name_place(site, layer)
            raise CaptureError(f"there is no {place}: only {self.site} of layer {self.layer}")
        return self.tensor

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
