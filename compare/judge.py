"""LayerJudge: judges the sites of one layer, each from its real rows, failing closed.

T real tokens of the batch, F channels of a site.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from compare.criteria import (
    ClassicLimits,
    Judgement,
    NoiseLimits,
    judge_classic,
    judge_noise,
    judge_routing,
    judge_without_floor,
)
from compare.noise import Rows, noise_ratio
from compare.routing import RouterNoise, align_weights, compare_routing, flipped_tokens
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import IncomparableError
from minimax_tools.floor import ROUTER_MARGIN, ROUTER_NOISE, error_name, ordinary_error_name, token_rows
from minimax_tools.metrics import PairMetrics, compare_tensors
from minimax_tools.results import NoiseRatio, SiteResult, SiteStatus
from minimax_tools.sites import Site

# Past a flip these are computed with other experts: they are judged where the experts agree.
_PAST_A_FLIP = (Site.ROUTER_WEIGHTS, Site.MOE_DELTA, Site.OUTPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """How to judge.

    Args:
        name: `noise` or `classic`.
        rtol, atol: Tolerances of an element's closeness.
        noise: Limits on ρ.
        classic: The seeds' limits.
    """

    name: str
    rtol: float
    atol: float
    noise: NoiseLimits = NoiseLimits()
    classic: ClassicLimits = ClassicLimits()


class LayerJudge:
    """Judges one layer of a target against its golden.

    Args:
        reference: The golden.
        target: The device run.
        layer: The layer.
        criteria: How to judge.
        incoming: Relative error of the layer's input; 0 where it was fed the golden's.
    """

    def __init__(
        self, reference: CaptureSource, target: CaptureSource, *, layer: int, criteria: Criteria, incoming: float
    ) -> None:
        self._reference = reference
        self._target = target
        self._layer = layer
        self._criteria = criteria
        self._incoming = incoming
        self._mask = reference.read_attention_mask()
        self._set_aside = self._find_set_aside()

    def judge(self, site: Site) -> SiteResult:
        """The result of one declared site; nothing is skipped without a status that says so."""
        result = SiteResult(layer=self._layer, site=str(site), status=SiteStatus.NOT_EXPOSED)
        if site not in self._target.sites(self._layer):
            if site in self._target.not_exposed(self._layer):
                return replace(result, reason="the port does not expose it")
            return replace(result, status=SiteStatus.FAIL, reason="missing: the run declared it and did not store it")
        if site not in self._reference.sites(self._layer):
            return replace(result, status=SiteStatus.NOT_CAPTURED, reason="the golden was captured without it")
        reference, target = self._reference.read(self._layer, site), self._target.read(self._layer, site)
        if reference.shape != target.shape:
            reason = f"shape: expected {tuple(reference.shape)}, found {tuple(target.shape)}"
            return replace(result, status=SiteStatus.FAIL, reason=reason)
        if reference.is_floating_point() != target.is_floating_point():
            reason = f"dtype: expected {reference.dtype}, found {target.dtype}"
            return replace(result, status=SiteStatus.FAIL, reason=reason)
        if site is Site.ROUTER_EXPERTS:
            return self._judge_experts(result, self._real(reference, site), self._real(target, site))
        return self._judge_values(result, site, reference, target)

    def _judge_experts(self, result: SiteResult, reference: torch.Tensor, target: torch.Tensor) -> SiteResult:
        noise = self._router_noise()
        routing = compare_routing(reference, target, noise)
        if self._criteria.name == "classic":
            return replace(result, status=SiteStatus.PASS, routing=routing, reason="the classic limits ignore routing")
        status, reason = judge_routing(routing, self._criteria.noise, has_floor=noise is not None)
        return replace(result, status=status, reason=reason, routing=routing)

    def _judge_values(
        self, result: SiteResult, site: Site, reference: torch.Tensor, target: torch.Tensor
    ) -> SiteResult:
        rows = self._rows(site, reference, target)
        metrics = self._metrics(rows)
        failures = self._criteria.classic.failures(metrics)
        result = replace(result, metrics=metrics, classic_failures=failures)
        if metrics.num_nonfinite_reference:
            raise IncomparableError(
                f"the golden's {site} of layer {self._layer} holds {metrics.num_nonfinite_reference} NaN or Inf",
                next_step="Make the golden again; no port can be judged by this one.",
            )
        if metrics.num_nonfinite_target:
            reason = f"{metrics.num_nonfinite_target} NaN or Inf on real rows"
            return replace(result, status=SiteStatus.FAIL, reason=reason)
        if self._criteria.name == "classic":
            status, reason = judge_classic(failures)
            return replace(result, status=status, reason=reason)
        judged = self._judged(site, rows)
        if judged is None:
            reason = "no token is left on which both sides chose the same experts"
            return replace(result, status=SiteStatus.FAIL, reason=reason)
        noise = noise_ratio(judged) if judged.has_floor else None
        judged_metrics = metrics if judged is rows else self._metrics(judged)
        status, reason = self._judgement(noise, judged_metrics)
        if status is SiteStatus.PASS and reference.dtype != target.dtype:
            status, reason = SiteStatus.WARN, f"dtype: expected {reference.dtype}, found {target.dtype}"
        return replace(
            result,
            status=status,
            reason=reason,
            noise=noise,
            num_set_aside=rows.reference.shape[0] - judged.reference.shape[0],
        )

    def _judgement(self, noise: NoiseRatio | None, metrics: PairMetrics) -> Judgement:
        if noise is not None:
            return judge_noise(noise, metrics, self._criteria.noise)
        return judge_without_floor(metrics, math.hypot(self._relative_limit(), self._incoming))

    def _relative_limit(self) -> float:
        limits = self._criteria.noise
        description = self._reference.known_description
        weights = description.provenance.dtypes.get("weights") if description else None
        return limits.relative_l2_float32 if weights == "float32" else limits.relative_l2

    def _rows(self, site: Site, reference: torch.Tensor, target: torch.Tensor) -> Rows:
        """The real rows of both sides, with the floor that the golden kept."""
        reference_rows, target_rows = self._real(reference, site), self._real(target, site)
        twin = self._reference.read_twin(self._layer, site)
        twin_rows = None if twin is None else self._real(twin, site)
        if site is Site.ROUTER_WEIGHTS:
            reference_rows, target_rows, twin_rows = self._aligned(reference_rows, target_rows, twin_rows)
        return Rows(
            reference=reference_rows,
            target=target_rows,
            twin=twin_rows,
            error=self._floor(error_name(site)) if twin is None else None,
            error_ordinary=self._floor(ordinary_error_name(site)) if twin is None else None,
            places=self._places(reference),
            incoming=self._incoming,
        )

    def _aligned(
        self, reference: torch.Tensor, target: torch.Tensor, twin: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Router weights in the order of their experts; as they are where a side does not name its experts."""
        experts = self._experts()
        if experts is None:
            return reference, target, twin
        mine, theirs = experts
        aligned_reference, aligned_target = align_weights(mine, reference, theirs, target)
        return aligned_reference, aligned_target, None if twin is None else align_weights(mine, twin, mine, twin)[0]

    def _judged(self, site: Site, rows: Rows) -> Rows | None:
        """The rows to judge: past a flip, those whose experts agree. None where none is left."""
        if site not in _PAST_A_FLIP or self._set_aside is None or not bool(self._set_aside.any()):
            return rows
        kept = ~self._set_aside
        if not bool(kept.any()):
            return None
        return replace(
            rows,
            reference=rows.reference[kept],
            target=rows.target[kept],
            twin=None if rows.twin is None else rows.twin[kept],
            error=None if rows.error is None else rows.error[kept],
            error_ordinary=None if rows.error_ordinary is None else rows.error_ordinary[kept],
            places=rows.places[kept],
        )

    def _find_set_aside(self) -> torch.Tensor | None:
        """Tokens past a flip: where the expert sets differ, or could, for a port that does not show its own."""
        experts = self._experts()
        if experts is not None:
            return flipped_tokens(*experts)
        noise = self._router_noise()
        return None if noise is None else noise.is_fragile()

    def _experts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Both sides' experts [T,k]; None where a side does not have them."""
        site = Site.ROUTER_EXPERTS
        if site not in self._reference.sites(self._layer) or site not in self._target.sites(self._layer):
            return None
        reference, target = self._reference.read(self._layer, site), self._target.read(self._layer, site)
        if reference.shape != target.shape or target.is_floating_point():
            return None
        return self._real(reference, site), self._real(target, site)

    def _router_noise(self) -> RouterNoise | None:
        margin, noise = self._floor(ROUTER_MARGIN), self._floor(ROUTER_NOISE)
        if margin is None or noise is None:
            return None
        return RouterNoise(margin=margin, noise=noise, widening=self._widening())

    def _widening(self) -> float:
        """How much an incoming error adds to the noise on the router's logits."""
        floor = self._floor(error_name(Site.ROUTER_LOGITS))
        if self._incoming == 0.0 or floor is None or Site.ROUTER_LOGITS not in self._reference.sites(self._layer):
            return 1.0
        logits = self._real(self._reference.read(self._layer, Site.ROUTER_LOGITS), Site.ROUTER_LOGITS)
        own, added = float(floor.double().norm()), self._incoming * float(logits.double().norm())
        return math.hypot(own, added) / own if own > 0.0 else 1.0

    def _floor(self, name: str) -> torch.Tensor | None:
        statistic = self._reference.read_floor(self._layer, name)
        return None if statistic is None else self._real_tokens(statistic)

    def _real(self, tensor: torch.Tensor, site: Site) -> torch.Tensor:
        """A site's real rows [T,F]."""
        return self._real_tokens(token_rows(tensor, site))

    def _real_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B,S,…] as [T,…], padding left out."""
        return tensor.flatten(0, 1) if self._mask is None else tensor[self._mask.bool()]

    def _places(self, tensor: torch.Tensor) -> torch.Tensor:
        """Row and position of every real token, [T,2]."""
        mask = self._mask if self._mask is not None else torch.ones(tensor.shape[0], tensor.shape[1])
        return mask.bool().nonzero()

    def _metrics(self, rows: Rows) -> PairMetrics:
        metrics = compare_tensors(rows.reference, rows.target, rtol=self._criteria.rtol, atol=self._criteria.atol)
        token, channel = metrics.worst_index
        return replace(metrics, worst_index=(*rows.places[token].tolist(), channel))


def judge_layer(judge: LayerJudge, sites: tuple[Site, ...]) -> Mapping[Site, SiteResult]:
    """Every declared site of a layer, in execution order."""
    return {site: judge.judge(site) for site in sites}
