"""ModelJudge: judges the sites outside the layers (embedding, final norm, logits), and compares generated tokens."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from compare.judging.judge import judge_values, measure_golden
from compare.judging.logits import (
    FirstLogits,
    compare_generated,
    compare_logits,
    judge_logits,
    logit_noise,
)
from compare.noise.rows import InputError, Rows, Squares, measure_input_error, square_difference
from compare.sides.layer_floor import LayerFloor, read_squares
from compare.sides.pairing import find_mismatch
from compare.sides.sides import Sides
from minimax_tools.metrics.noise_floor import massive_channels, variant_name
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import NOT_EXPOSED, GeneratedRow, SiteResult, SiteStatus


class ModelJudge:
    """Judges a target's sites outside the layers; `last_layer` is the one before the head."""

    def __init__(self, sides: Sides, *, last_layer: int) -> None:
        self._sides = sides
        self._last_layer = last_layer
        self._floor = LayerFloor(sides.reference, sides.batch, layer=None)

    def judge(self, site: ModelSite) -> SiteResult:
        """Judge one declared site."""
        reference, target = self._sides.reference, self._sides.target
        result = SiteResult(layer=None, site=str(site), status=SiteStatus.FAIL)
        if site not in target.model_sites():
            if target.read_passes() is not None:
                # A whole port shows what it has.
                reason = NOT_EXPOSED
                return replace(result, status=SiteStatus.NOT_EXPOSED, reason=reason)
            return replace(result, reason="missing: the run declared it and did not store it")
        if site not in reference.model_sites():
            reason = "the golden was captured without it"
            return replace(result, status=SiteStatus.NOT_CAPTURED, reason=reason)
        golden, port = self._read(site)
        mismatch = find_mismatch(golden, port)
        if mismatch is not None:
            return replace(result, reason=mismatch)
        rows = self._rows(site, golden, port)
        if rows.num_tokens == 0:
            reason = "the sides hold it of no token in common"
            return replace(result, status=SiteStatus.NOT_JUDGED, reason=reason)
        judged = judge_values(
            result, rows, criteria=self._sides.criteria, context=self._sides.limit_context()
        )
        return self._judge_tokens(judged, rows) if site is ModelSite.LOGITS else judged

    def measure_golden(self, result: SiteResult) -> SiteResult:
        """Measure the golden itself against the port at a site that was judged on the port's own last layer."""
        site, batch = ModelSite(result.site), self._sides.batch
        if result.metrics is None or site not in self._sides.reference.model_sites():
            return result
        golden, port = self._read(site)
        if find_mismatch(golden, port) is not None:
            return result
        # No noise floor is needed: the figures are of the values alone.
        parts = batch.rows(golden, site), batch.rows(port, site), batch.places(golden, site)
        held = self._held(site)
        golden_th, port_th, places = parts if held is None else (part[held] for part in parts)
        if not len(places):
            return result
        return measure_golden(result, golden_th, port_th, places, criteria=self._sides.criteria)

    def judged_rows(self, site: ModelSite) -> Rows | None:
        """Return the tokens of a site that `judge` judges; None if both sides' values cannot be compared."""
        reference, target = self._sides.reference, self._sides.target
        if any(site not in side.model_sites() for side in (reference, target)):
            return None
        golden, port = self._read(site)
        return None if find_mismatch(golden, port) is not None else self._rows(site, golden, port)

    def judge_generated(self) -> tuple[GeneratedRow, ...]:
        """Compare what both sides generated, prompt by prompt; empty if a side generated nothing."""
        golden, port = (side.read_generation() for side in (self._sides.reference, self._sides.target))
        if golden is None or port is None:
            return ()
        rows = self.read_logits()
        if rows is None:
            return compare_generated(golden, port, noise=None, places=None)
        noise = logit_noise(rows, usual_error=self.usual_error)
        first = _first_logits(rows, len(golden.rows))
        return compare_generated(golden, port, noise=noise, places=rows.places, first=first)

    def read_logits(self) -> Rows | None:
        """Read the logits of both sides; None if a side lacks them, or they cannot be compared."""
        reference, target = self._sides.reference, self._sides.target
        if any(ModelSite.LOGITS not in side.model_sites() for side in (reference, target)):
            return None
        golden, port = self._read(ModelSite.LOGITS)
        if find_mismatch(golden, port) is not None or not bool(port.isfinite().all()):
            return None
        return self._rows(ModelSite.LOGITS, golden, port)

    @property
    def usual_error(self) -> float:
        """Usual error of right ports, relative to the logits, if the golden kept no floor."""
        limits = self._sides.criteria.noise
        if self._sides.limit_context().is_float32:
            return limits.float32
        return limits.floorless(ModelSite.LOGITS, "relative_l2").usual

    def _judge_tokens(self, result: SiteResult, rows: Rows) -> SiteResult:
        """Add next-token distributions to the logits' result; they may make it worse."""
        if result.metrics is None or result.metrics.num_nonfinite_target:
            return result
        logits = compare_logits(rows, usual_error=self.usual_error)
        result = replace(result, logits=logits)
        criteria = self._sides.criteria
        status, reason = judge_logits(logits, noise=criteria.noise, context=self._sides.limit_context())
        # The classic limits judge layer outputs alone.
        if criteria.name == "classic" or status is SiteStatus.PASS:
            return result
        worst = SiteStatus.FAIL if SiteStatus.FAIL in (status, result.status) else SiteStatus.WARN
        return replace(result, status=worst, reason="; ".join(filter(None, (result.reason, reason))))

    def _read(self, site: ModelSite) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a site of both sides, the port's embedding in the golden's dtype: a lookup rounds nothing."""
        golden, port = (side.read(None, site) for side in (self._sides.reference, self._sides.target))
        is_other = port.is_floating_point() and golden.is_floating_point()
        return golden, port.to(golden.dtype) if site is ModelSite.EMBEDDING and is_other else port

    def _rows(self, site: ModelSite, reference: torch.Tensor, target: torch.Tensor) -> Rows:
        """Return the tokens of a site that both sides hold, with the golden's floor.

        Raises:
            CaptureError: The floor that the golden stored does not fit its own values.
        """
        batch = self._sides.batch
        golden = batch.rows(reference, site)
        twin, massive = self._twin(site, golden), massive_channels(golden)
        floor = None
        if twin is None:
            floor = self._floor.squares(site)
        elif twin is not golden:  # the golden is the embedding's twin: its floor is zero
            floor = square_difference(twin, golden, massive=massive)
            self._floor.prove(site, floor)
        rows = Rows(
            reference=golden,
            target=batch.rows(target, site),
            massive=massive,
            places=batch.places(reference, site),
            twin=twin,
            floor=floor,
            widened_floor=self._widened_floor(site),
            input_error=self._input_error() if site is not ModelSite.EMBEDDING else None,
        )
        held = self._held(site)
        return rows if held is None else rows.select(held)

    def _held(self, site: ModelSite) -> torch.Tensor | None:
        """Return the real tokens that both sides hold, bool [T]; None for all. A dump may hold each prompt's last."""
        held = [
            self._sides.batch.tokens(is_held)  # bool [B,S] to bool [T]
            for side in (self._sides.reference, self._sides.target)
            if (is_held := side.held_tokens(site)) is not None
        ]
        return torch.stack(held).all(dim=0) if held else None

    def _twin(self, site: ModelSite, reference: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 twin of the golden's `reference`, [tokens, channels]."""
        # An embedding's lookup rounds nothing, so the golden (the same object) is its own twin.
        if site is ModelSite.EMBEDDING:
            return reference
        twin = self._sides.reference.read_twin(None, site)
        return None if twin is None else self._sides.batch.rows(twin, site)

    def _widened_floor(self, site: ModelSite) -> Squares | None:
        """Return (variant − twin)², the largest per token; None if no variant was measured at the site."""
        description = self._sides.reference.known_description
        variants = () if description is None else description.floor_variants
        measured = [
            read_squares(site, lambda name: self._floor.statistic(variant_name(variant, name)))  # noqa: B023
            for variant in variants
        ]
        squares = [found for found in measured if found is not None]
        return functools.reduce(Squares.maximum, squares) if squares else None

    def _input_error(self) -> InputError | None:
        """Measure the error of the head's input; None if it is the golden's, or a side does not keep it."""
        rows = self._sides.read_rows(self._last_layer, Site.OUTPUT)
        input_error = None if rows is None else measure_input_error(*rows)
        return None if input_error is None or input_error.overall == 0.0 else input_error


def _first_logits(rows: Rows, num_prompts: int) -> FirstLogits | None:
    """Return the logits of each prompt's last token, which choose the first generated one; None if one lacks them."""
    # `places` holds the prompt and the position of each token, in ascending order.
    tokens = [(rows.places[:, 0] == prompt).nonzero().flatten() for prompt in range(num_prompts)]
    if any(len(indices) == 0 for indices in tokens):
        return None
    last = torch.stack([indices[-1] for indices in tokens])
    return FirstLogits(reference=rows.reference[last], target=rows.target[last])
