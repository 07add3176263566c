"""ModelJudge: judges the sites outside the layers: embedding, final norm, logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from compare.judging.generated import FirstLogits, compare_generated
from compare.judging.judge import judge_values
from compare.judging.logits import compare_logits, logit_noise
from compare.judging.noise_judge import judge_broken
from compare.limits.criteria import Judgement
from compare.limits.limit_context import LimitContext
from compare.limits.limits import NoiseLimits
from compare.noise.input_error import InputError, measure_input_error
from compare.noise.rows import Rows
from compare.noise.squared_errors import Squares, square_difference
from compare.sides.pairing import find_mismatch
from compare.sides.proven_floor import refuse_other_floor, refuse_torn_floor
from compare.sides.sides import Sides
from minimax_tools.metrics.noise_floor import (
    error_name,
    massive_channels,
    massive_error_name,
    ordinary_error_name,
)
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.choices import LogitsResult
from minimax_tools.results.results import GeneratedRow, SiteResult, SiteStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Limits on next-token distributions.

    Args:
        kl: Of the divergence's mean and 95th percentile, in units of what noise foretells. A divergence grows with
            the square of the error, so it is the square of ρ's limit; clean ports stay below 0.4 (mean) and 0.7
            (95th percentile) with errors inherited from 3 to 6 layers, and at 1 with none, as both sides err there.
        fewest: Tokens from which that holds. Of fewer, as where a dump holds each prompt's last token alone, the limit
            grows with the root of what is lacking: where two tokens share nearly all probability, the divergence of
            one is half a squared normal deviate, which exceeds 4 once in 200 prompts, and 16 never.
        unexplained: Places whose likeliest token is another although noise cannot have turned the margin round: a
            right port has none, since the reach lies four deviations out.
    """

    kl: float = 4.0
    fewest: int = 16
    unexplained: int = 0

    def kl_of(self, num_tokens: int) -> float:
        """Return the limit on a divergence of so many tokens."""
        return self.kl * math.sqrt(max(self.fewest / max(num_tokens, 1), 1.0))


def judge_logits(
    logits: LogitsResult, limits: TokenLimits, *, noise: NoiseLimits, context: LimitContext
) -> Judgement:
    """Judge next-token distributions.

    Args:
        logits: What they say.
        limits: What those of right ports stay below.
        noise: Where limits were measured, and how much further one must be broken elsewhere.
        context: Where the port ran.
    """
    faults = []
    if logits.num_unexplained > limits.unexplained:
        worst = logits.worst_choices[0]
        faults.append(
            f"{logits.num_unexplained} of {logits.num_tokens} likeliest tokens are others beyond noise, the worst at "
            f"row {worst.row}, position {worst.position}: {worst.target} for {worst.reference}, {worst.margin:.3g} "
            f"below it where noise reaches {worst.reach:.3g}"
        )
    is_anywhere = bool(faults)
    limit = limits.kl_of(logits.num_tokens)
    for name, found, foreseen in (
        ("mean", logits.kl_mean, logits.kl_mean_foreseen),
        ("95th percentile", logits.kl_p95, logits.kl_p95_foreseen),
    ):
        if not found <= limit * foreseen:
            faults.append(
                f"{name} of the divergence is {found:.3g} nats, noise comes to {foreseen:.3g}, limit {limit:.3g}×"
            )
            # A divergence grows with the square of the error.
            is_anywhere |= not found <= noise.slack**2 * limit * foreseen
    if not faults:
        return SiteStatus.PASS, ""
    return judge_broken("; ".join(faults), noise, context=context, is_anywhere=is_anywhere)


class ModelJudge:
    """Judges a target's sites outside the layers.

    Args:
        last_layer: The layer before the head.
    """

    def __init__(self, sides: Sides, *, last_layer: int) -> None:
        self._sides = sides
        self._last_layer = last_layer

    def judge(self, site: ModelSite) -> SiteResult:
        """Judge one declared site."""
        reference, target = self._sides.reference, self._sides.target
        result = SiteResult(layer=None, site=str(site), status=SiteStatus.FAIL)
        if site not in target.model_sites():
            return replace(result, reason="missing: the run declared it and did not store it")
        if site not in reference.model_sites():
            reason = "the golden was captured without it"
            return replace(result, status=SiteStatus.NOT_CAPTURED, reason=reason)
        golden, port = reference.read_model(site), target.read_model(site)
        mismatch = find_mismatch(golden, port)
        if mismatch is not None:
            return replace(result, reason=mismatch)
        rows = self._rows(site, golden, port)
        if rows.num_tokens == 0:
            reason = "the sides hold it of no token in common"
            return replace(result, status=SiteStatus.NOT_JUDGED, reason=reason)
        judged = judge_values(
            result,
            rows,
            criteria=self._sides.criteria,
            context=self._sides.limit_context(),
        )
        return self._judge_tokens(judged, rows) if site is ModelSite.LOGITS else judged

    def judge_generated(self) -> tuple[GeneratedRow, ...]:
        """Compare what both sides generated, prompt by prompt; nothing where a side generated nothing.

        Raises:
            CaptureError: A file is damaged.
        """
        golden, port = (side.read_generation() for side in (self._sides.reference, self._sides.target))
        if golden is None or port is None:
            return ()
        rows = self._read_logits()
        return compare_generated(
            golden,
            port,
            noise=None if rows is None else logit_noise(rows, usual_error=self._usual_error),
            places=None if rows is None else rows.places,
            first=None if rows is None else _first_logits(rows, len(golden.rows)),
        )

    def _read_logits(self) -> Rows | None:
        """Read the logits of both sides; None where a side lacks them, or they cannot be compared."""
        reference, target = self._sides.reference, self._sides.target
        if any(ModelSite.LOGITS not in side.model_sites() for side in (reference, target)):
            return None
        golden, port = reference.read_model(ModelSite.LOGITS), target.read_model(ModelSite.LOGITS)
        if find_mismatch(golden, port) is not None or not bool(port.isfinite().all()):
            return None
        return self._rows(ModelSite.LOGITS, golden, port)

    @property
    def _usual_error(self) -> float:
        """Usual error of right ports, relative to the logits, where the golden kept no floor."""
        limits = self._sides.criteria.noise
        if self._sides.limit_context().is_float32:
            return limits.float32
        return limits.floorless(ModelSite.LOGITS, "relative_l2").usual

    def _judge_tokens(self, result: SiteResult, rows: Rows) -> SiteResult:
        """Add to the logits' result what they say of the next tokens."""
        if result.metrics is None or result.metrics.num_nonfinite_target:
            return result
        logits = compare_logits(rows, usual_error=self._usual_error)
        result = replace(result, logits=logits)
        criteria = self._sides.criteria
        status, reason = judge_logits(
            logits, TokenLimits(), noise=criteria.noise, context=self._sides.limit_context()
        )
        if criteria.name == "classic" or status is SiteStatus.PASS:
            return result
        worst = SiteStatus.FAIL if SiteStatus.FAIL in (status, result.status) else SiteStatus.WARN
        return replace(result, status=worst, reason="; ".join(one for one in (result.reason, reason) if one))

    def _rows(self, site: ModelSite, reference: torch.Tensor, target: torch.Tensor) -> Rows:
        batch = self._sides.batch
        golden = batch.rows(reference, site)
        twin, massive = self._twin(site, golden, target), massive_channels(golden)
        if twin is None or twin is golden:
            floor = self._stored_floor(site) if twin is None else None
        else:
            floor = self._measured_floor(site, golden, twin, massive)
        rows = Rows(
            reference=golden,
            target=batch.rows(target, site),
            massive=massive,
            places=batch.places(reference, site),
            twin=twin,
            floor=floor,
            input_error=self._input_error() if site is not ModelSite.EMBEDDING else None,
        )
        held = [
            batch.tokens(places)
            for side in (self._sides.reference, self._sides.target)
            if (places := side.held_rows(site)) is not None
        ]
        return rows.select(torch.stack(held).all(dim=0)) if held else rows

    def _twin(self, site: ModelSite, reference: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
        # A lookup rounds nothing: its floor is zero, unless a side stored it in another dtype.
        if site is ModelSite.EMBEDDING and reference.dtype == target.dtype:
            return reference
        twin = self._sides.reference.read_model_twin(site)
        return None if twin is None else self._sides.batch.rows(twin, site)

    def _measured_floor(
        self, site: ModelSite, reference: torch.Tensor, twin: torch.Tensor, massive: torch.Tensor
    ) -> Squares:
        """Sum (golden − twin)² per token, which must be what the golden stored of it."""
        measured = square_difference(twin, reference, massive=massive)
        stored = self._statistic(error_name(site))
        refuse_other_floor(self._sides.reference, None, site, measured=measured, stored=stored)
        return measured

    def _stored_floor(self, site: ModelSite) -> Squares | None:
        ordinary = self._statistic(ordinary_error_name(site))
        massive = self._statistic(massive_error_name(site))
        if ordinary is None or massive is None:
            return None
        squares = Squares.of(ordinary=ordinary, massive=massive)
        stored = self._statistic(error_name(site))
        refuse_torn_floor(self._sides.reference, None, site, parts=squares, stored=stored)
        return squares

    def _statistic(self, name: str) -> torch.Tensor | None:
        """Read one of the golden's floor statistics of the model's sites, [T]."""
        statistic = self._sides.reference.read_model_floor(name)
        return None if statistic is None else self._sides.batch.tokens(statistic)

    def _input_error(self) -> InputError | None:
        """Measure the error of the head's input; None where it is the golden's, or a side does not keep it."""
        rows = self._sides.read_rows(self._last_layer, Site.OUTPUT)
        input_error = None if rows is None else measure_input_error(*rows)
        return None if input_error is None or input_error.overall == 0.0 else input_error


def _first_logits(rows: Rows, num_prompts: int) -> FirstLogits | None:
    """Return the logits behind each prompt; None where those of a prompt are not held."""
    last = [(rows.places[:, 0] == row).nonzero() for row in range(num_prompts)]
    if any(len(places) == 0 for places in last):
        return None
    tokens = torch.stack([places[-1, 0] for places in last])
    return FirstLogits(reference=rows.reference[tokens], target=rows.target[tokens])
