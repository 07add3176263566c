"""Judging: two tensors of one site become a result; it fails closed, and says what is wrong.

T judged tokens, F channels of a site.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from compare.criteria import (
    ClassicLimits,
    Judgement,
    NoiseLimits,
    judge_classic,
    judge_noise,
    judge_without_floor,
)
from compare.noise import Rows, noise_ratio
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import IncomparableError
from minimax_tools.metrics import PairMetrics, compare_tensors
from minimax_tools.results import SiteResult, SiteStatus


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
    noise: NoiseLimits = field(default_factory=NoiseLimits)
    classic: ClassicLimits = field(default_factory=ClassicLimits)


def find_mismatch(reference: torch.Tensor, target: torch.Tensor) -> str | None:
    """Why two tensors of a site cannot be compared, in words; None where they can.

    A target may be [B·S,F] where the reference is [B,S,F], and the other way round.
    """
    is_folded = {reference.ndim, target.ndim} == {2, 3} and reference.shape[-1] == target.shape[-1]
    if reference.shape != target.shape and not (is_folded and reference.numel() == target.numel()):
        return f"shape: expected {tuple(reference.shape)}, found {tuple(target.shape)}"
    if reference.is_floating_point() != target.is_floating_point():
        return f"dtype: expected {reference.dtype}, found {target.dtype}"
    return None


def judge_values(
    result: SiteResult,
    rows: Rows,
    *,
    criteria: Criteria,
    relative_limit: float,
    set_aside: torch.Tensor | None = None,
    replayed: Rows | None = None,
) -> SiteResult:
    """Judge the values of one site.

    Args:
        result: Which layer and site; its other fields are filled in.
        rows: Both sides' tokens.
        criteria: How to judge.
        relative_limit: Limit on the relative L2 error, where the rows have no floor.
        set_aside: Tokens that ρ must leave out, bool [T].
        replayed: What ρ is taken of: the same rows, the golden's with the port's own experts. None for `rows`.

    Raises:
        IncomparableError: The golden holds NaN or Inf on a real row.
    """
    metrics = _measure(rows, criteria)
    if metrics.num_nonfinite_reference:
        raise _unusable(result, metrics)
    result = replace(result, metrics=metrics, classic_failures=criteria.classic.failures(metrics))
    if metrics.num_nonfinite_target:
        return replace(result, status=SiteStatus.FAIL, reason=_describe_nonfinite(rows, metrics))
    if criteria.name == "classic":
        return _concluded(result, judge_classic(result.classic_failures))
    if rows.incoming is not None and not rows.incoming.is_finite:
        return replace(result, status=SiteStatus.FAIL, reason="NaN or Inf was handed on to its layer")
    judged = rows if replayed is None else replayed
    if set_aside is not None and bool(set_aside.any()):
        judged = judged.select(~set_aside)
    result = replace(result, num_set_aside=rows.num_tokens - judged.num_tokens)
    if judged.num_tokens == 0:
        reason = "no token is left on which both sides are sure to choose the same experts"
        return replace(result, status=SiteStatus.NOT_JUDGED, reason=reason)
    judged_metrics = metrics if judged is rows else _measure(judged, criteria)
    if not judged.has_floor:
        incoming = judged.incoming.overall if judged.incoming else 0.0
        judgement = judge_without_floor(judged_metrics, math.hypot(relative_limit, incoming))
        return _concluded(result, _note_dtype(judgement, judged))
    noise = noise_ratio(judged)
    judgement = judge_noise(noise, judged_metrics, criteria.noise)
    return _concluded(replace(result, noise=noise), _note_dtype(judgement, judged))


def relative_limit(reference: CaptureSource, criteria: Criteria) -> float:
    """Limit on the relative L2 error for a golden without a floor: float32 has next to no noise."""
    description = reference.known_description
    weights = description.provenance.dtypes.get("weights") if description else None
    return criteria.noise.relative_l2_float32 if weights == "float32" else criteria.noise.relative_l2


def _measure(rows: Rows, criteria: Criteria) -> PairMetrics:
    metrics = compare_tensors(rows.reference, rows.target, rtol=criteria.rtol, atol=criteria.atol)
    token, channel = metrics.worst_index
    return replace(metrics, worst_index=(*rows.places[token].tolist(), channel))


def _unusable(result: SiteResult, metrics: PairMetrics) -> IncomparableError:
    place = f"{result.site} of layer {result.layer}" if result.layer is not None else result.site
    return IncomparableError(
        f"the golden's {place} holds {metrics.num_nonfinite_reference} NaN or Inf on real rows",
        next_step="Make the golden again: no port can be judged by this one.",
    )


def _describe_nonfinite(rows: Rows, metrics: PairMetrics) -> str:
    first = int((~rows.target.isfinite()).any(dim=-1).nonzero()[0])
    row, position = rows.places[first].tolist()
    count = metrics.num_nonfinite_target
    return f"{count} NaN or Inf on real rows, the first at row {row}, position {position}"


def _note_dtype(judgement: Judgement, rows: Rows) -> Judgement:
    """A pass in another dtype than the golden's deserves a look."""
    if judgement[0] is SiteStatus.PASS and rows.dtype != rows.target.dtype:
        return SiteStatus.WARN, f"dtype: expected {rows.dtype}, found {rows.target.dtype}"
    return judgement


def _concluded(result: SiteResult, judgement: Judgement) -> SiteResult:
    status, reason = judgement
    return replace(result, status=status, reason=reason)
