"""LayerJudge: judges the sites of one layer.

A flip is a token for which the port chose other experts than the golden. Behind the router, the values of such a token
come from another computation: they are judged against the golden with the port's experts (see `replay`), or set aside.
Criteria called `classic` are five fixed limits on layer outputs alone, without noise and replay.
T real tokens of the batch, F channels of a site, k experts per token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from compare.judging.judge import judge_values, measure_golden
from compare.judging.port_choice import (
    DerivedChoice,
    Replay,
    derive_choice,
    find_contradictions,
    find_nearest_choice,
)
from compare.judging.routing import (
    RouterNoise,
    align_by_expert,
    align_by_size,
    compare_routing,
    judge_routing,
)
from compare.limits.criteria import OUTPUTS_ALONE
from compare.limits.limits import LimitContext
from compare.noise.rows import BothErrors, Rows, Squares
from compare.sides.captured_input import CapturedInput
from compare.sides.layer_floor import LayerFloor
from compare.sides.pairing import find_mismatch
from compare.sides.sides import Sides
from minimax_tools.metrics.error_sums import sum_errors
from minimax_tools.metrics.noise_floor import ROUTER_MARGIN, ROUTER_NOISE, error_name, massive_channels
from minimax_tools.model.sites import BEHIND_EXPERTS, Site
from minimax_tools.results.results import NOT_EXPOSED, SiteResult, SiteStatus

# A port may round the affinities of all experts to BF16, and then the weights that it makes of them, as NxD does.
_NUM_ROUNDINGS = {Site.ROUTER_WEIGHTS: 2}
# Sites behind the choice of experts.
_PAST_A_FLIP = (Site.ROUTER_WEIGHTS, *BEHIND_EXPERTS)


class LayerJudge:
    """Judges one layer, which both sides hold, of a device run against its golden.

    `router_noise` is margin and noise of the golden's choice of experts; None if it kept no floor of them.
    """

    def __init__(self, sides: Sides, *, layer: int, layer_input: CapturedInput) -> None:
        self._sides = sides
        self._reference = sides.reference
        self._target = sides.target
        self._batch = sides.batch
        self._criteria = sides.criteria
        self._layer = layer
        self._input_error = layer_input.error
        self._floor = LayerFloor(sides.reference, sides.batch, layer=layer)
        # The golden's and the port's, [T,k] each; None if a side hides them.
        self._experts = sides.read_rows(layer, Site.ROUTER_EXPERTS)
        self.router_noise = self._read_router_noise()
        self._derived = self._derive_choice() if self._hides_experts else None
        choices = self._experts
        if self._derived is not None:
            golden = self._reference.read(layer, Site.ROUTER_EXPERTS)
            choices = self._batch.rows(golden, Site.ROUTER_EXPERTS), self._derived.experts
        self._replay = None if choices is None else Replay(sides, layer=layer, experts=choices)

    def _derive_choice(self) -> DerivedChoice | None:
        """Derive the port's choice from its router; tokens that this leaves open, from the output of its experts.

        The latter needs the golden's input, and the noise of its router and of that output.
        """
        derived = derive_choice(self._sides, self._layer)
        noise = self.router_noise
        is_settled = derived is not None and bool(derived.is_sure.all())
        if is_settled or noise is None or self._input_error is not None or self._sides.is_classic:
            return derived
        for site in BEHIND_EXPERTS:
            golden_and_port = self._sides.read_rows(self._layer, site)
            if golden_and_port is None or not bool(golden_and_port[1].isfinite().all()):
                continue
            rows = self.stored_rows(site)
            if not rows.has_floor:
                return derived
            nearest = find_nearest_choice(self._sides, self._layer, site=site, rows=rows, noise=noise)
            return nearest if derived is None else derived.completed(nearest)
        return derived

    @property
    def _hides_experts(self) -> bool:
        """True if the port does not show its choice of experts, and shows a site behind it."""
        held, shown = self._reference.sites(self._layer), self._target.sites(self._layer)
        return (
            Site.ROUTER_EXPERTS in held
            and Site.ROUTER_EXPERTS not in shown
            and any(site in shown for site in _PAST_A_FLIP)
        )

    def judge(self, site: Site) -> SiteResult:
        """Judge one declared site; if it cannot be judged, the status says so."""
        result = SiteResult(layer=self._layer, site=str(site), status=SiteStatus.FAIL)
        if site not in self._target.sites(self._layer):
            if site in self._target.not_exposed(self._layer):
                reason = self._explain_absence(site)
                return replace(result, status=SiteStatus.NOT_EXPOSED, reason=reason)
            return replace(result, reason="missing: the run declared it and did not store it")
        if site not in self._reference.sites(self._layer):
            reason = "the golden was captured without it"
            return replace(result, status=SiteStatus.NOT_CAPTURED, reason=reason)
        reference, target = self._reference.read(self._layer, site), self._target.read(self._layer, site)
        mismatch = find_mismatch(reference, target)
        if mismatch is not None:
            return replace(result, reason=mismatch)
        if site is Site.ROUTER_EXPERTS:
            return self._judge_experts(result)
        rows = self.stored_rows(site)
        context = self.limit_context(site)
        if site not in _PAST_A_FLIP or self._sides.is_classic:
            return judge_values(result, rows, criteria=self._criteria, context=context)
        replay = self._replay_of(site)
        replayed_tokens = None if replay is None else replay.tokens(site)
        return judge_values(
            replace(result, num_replayed=0 if replayed_tokens is None else int(replayed_tokens.sum())),
            rows,
            criteria=self._criteria,
            context=context,
            set_aside=self._find_set_aside(replayed_tokens),
            replayed=None if replay is None else replay.rows(site, rows),
        )

    def _explain_absence(self, site: Site) -> str:
        num_calls = self._target.num_calls(self._layer).get(site)
        if num_calls is None:
            return NOT_EXPOSED
        return f"computed {num_calls} times in a forward, in parts that cannot be joined to the batch"

    def judged_rows(self, site: Site) -> Rows | None:
        """Return the tokens that ρ of a site judges, past a flip against the golden with the port's experts.

        None for the choice of experts, and if both sides' values cannot be compared.
        """
        if site is Site.ROUTER_EXPERTS or self._sides.read_rows(self._layer, site) is None:
            return None
        rows = self.stored_rows(site)
        if site not in _PAST_A_FLIP:
            return rows
        replay = self._replay_of(site)
        set_aside = self._find_set_aside(None if replay is None else replay.tokens(site))
        if replay is not None:
            rows = replay.rows(site, rows)
        return rows if set_aside is None else rows.select(~set_aside)

    def judge_rows(self, site: Site, rows: Rows) -> SiteResult:
        """Judge a site on some of its tokens or channels, or on other values of the port or the golden."""
        result = SiteResult(layer=self._layer, site=str(site), status=SiteStatus.FAIL)
        return judge_values(result, rows, criteria=self._criteria, context=self.limit_context(site))

    def is_right(self, site: Site, rows: Rows) -> bool:
        """Decide whether a site passes on such rows."""
        return self.judge_rows(site, rows).status is not SiteStatus.FAIL

    def _judge_experts(self, result: SiteResult) -> SiteResult:
        assert self._experts is not None, "both sides hold experts of one shape here"
        judged = self.judge_choice(result, self._experts[0], self.choice_noise)
        replay = self._replay
        if self._sides.is_classic or replay is None or not bool(replay.flipped.any()):
            return judged
        if judged.status is SiteStatus.FAIL:
            return judged
        if not self.has_contradictions:
            return judged
        return replace(judged, status=SiteStatus.FAIL, reason=self._describe_contradictions())

    @property
    def experts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The golden's and the port's experts, [T,k] each; None if a side hides them."""
        return self._experts

    @property
    def choice_noise(self) -> RouterNoise | None:
        """Margin and noise of the golden's choice, with its scores if they can tell how close a flip was."""
        noise, replay = self.router_noise, self._replay
        if noise is None or replay is None or self._sides.is_classic or not bool(replay.flipped.any()):
            return noise
        return replace(noise, scores=replay.scores)

    @property
    def has_contradictions(self) -> bool:
        """True if the port's experts contradict its own logits: its own mistake, whatever its input."""
        return self._contradictions is not None and bool(self._contradictions.any())

    @cached_property
    def _contradictions(self) -> torch.Tensor | None:
        if self._experts is None:
            return None
        return find_contradictions(self._sides, self._layer, self._experts[1])

    def _describe_contradictions(self) -> str:
        contradictions = self._contradictions
        assert contradictions is not None, "there are contradictions"
        row, position = self.choice_places()[contradictions.nonzero()[0, 0]].tolist()
        return (
            f"{int(contradictions.sum())} of {len(contradictions)} tokens chose other experts than the port's own "
            f"logits and the checkpoint's correction bias give (the first: row {row}, token {position})"
        )

    def choice_places(self) -> torch.Tensor:
        """Return row and position of each token whose experts both sides hold, [T,2]."""
        experts = self._reference.read(self._layer, Site.ROUTER_EXPERTS)
        return self._batch.places(experts, Site.ROUTER_EXPERTS)

    def judge_choice(
        self, result: SiteResult, experts: torch.Tensor, noise: RouterNoise | None
    ) -> SiteResult:
        """Judge the port's experts against the right ones [T,k], and fill in the result.

        `noise` is the margin and noise of the right choice; None if the golden kept no floor.
        """
        assert self._experts is not None, "both sides hold experts of one shape here"
        routing = compare_routing(experts, self._experts[1], noise, places=self.choice_places())
        if self._sides.is_classic:
            status, reason = SiteStatus.NOT_JUDGED, OUTPUTS_ALONE
        else:
            status, reason = judge_routing(
                routing,
                self._criteria.noise,
                has_floor=noise is not None,
                input_error=self._input_error.overall if self._input_error else 0.0,
                context=self.limit_context(Site.ROUTER_EXPERTS),
            )
        return replace(result, status=status, reason=reason, routing=routing)

    def limit_context(self, site: Site) -> LimitContext:
        """Return the facts that a site's limits depend on."""
        return self._sides.limit_context(hides_flips=site in _PAST_A_FLIP and self._replay is None)

    def stored_rows(self, site: Site) -> Rows:
        """Read the real tokens of a site that both sides hold in one shape, with the golden's floor."""
        reference, target = self._reference.read(self._layer, site), self._target.read(self._layer, site)
        twin = self._reference.read_twin(self._layer, site)
        golden, port = self._batch.rows(reference, site), self._batch.rows(target, site)
        exact = None if twin is None else self._batch.rows(twin, site)
        massive = massive_channels(golden)
        errors: BothErrors | None = None
        if exact is None:
            floor: Squares | None = self._floor.squares(site)
        else:
            errors = BothErrors(*sum_errors(golden, port, exact=exact, massive=massive))
            floor = Squares.of_errors(errors.golden)
            self._floor.prove(site, floor)
        if site is Site.ROUTER_WEIGHTS:
            # The twin's weights are of the golden's experts.
            exact = None if exact is None else _align((exact, exact), self._experts)[0]
            golden, port = _align((golden, port), self._experts)
            # Sorted by expert, golden and twin may be another distance apart: ρ measures the errors again from them.
            floor, errors = floor if exact is None else None, None
        return Rows(
            reference=golden,
            target=port,
            massive=massive,
            places=self._batch.places(reference, site),
            twin=exact,
            floor=floor,
            widened_floor=self._floor.widened_squares(site),
            variant_averages=self._floor.variant_averages(site),
            input_error=self._input_error,
            num_roundings=_NUM_ROUNDINGS.get(site, 1),
            errors=errors,
        )

    def _replay_of(self, site: Site) -> Replay | None:
        """Return the replay for a site; none for router weights without experts, which have no order."""
        return None if site is Site.ROUTER_WEIGHTS and self._experts is None else self._replay

    def _find_set_aside(self, replayed_tokens: torch.Tensor | None) -> torch.Tensor | None:
        """Find tokens that noise must not judge, bool [T]: flips without replay, and tokens of unsure experts.

        Without any choice of the port, all tokens that noise may flip are set aside; None if noise is not known.
        """
        if self._replay is not None:
            flipped = self._replay.flipped
            set_aside = flipped if replayed_tokens is None else flipped & ~replayed_tokens
            return set_aside if self._derived is None else set_aside | ~self._derived.is_sure
        return None if self.router_noise is None else self.router_noise.is_fragile()

    def _read_router_noise(self) -> RouterNoise | None:
        """Read margin and noise of the golden's choice, and refuse a golden whose logits contradict them."""
        margin, noise = self._floor.statistic(ROUTER_MARGIN), self._floor.largest(ROUTER_NOISE)
        if margin is None or noise is None:
            return None
        self._floor.prove_router()
        return RouterNoise(margin=margin, noise=noise, widening=self._widening())

    def _widening(self) -> torch.Tensor | None:
        """Return the factor by which an input error widens the noise on the router's logits, [T]; None without one."""
        site = Site.ROUTER_LOGITS
        floor = self._floor.largest(error_name(site))
        if self._input_error is None or floor is None or site not in self._reference.sites(self._layer):
            return None
        logits = self._batch.rows(self._reference.read(self._layer, site), site)
        usual = floor.double().square().mean()
        added = (self._input_error.inherited * logits.double().norm(dim=-1)).square()
        return ((usual + added) / usual).sqrt() if float(usual) > 0.0 else None


def measure_golden_site(result: SiteResult, sides: Sides) -> SiteResult:
    """Measure the golden itself against the port at a layer's site that was judged on the port's own input.

    Without values of the golden, no figure of the golden is left.
    """
    layer, site = result.layer, Site(result.site)
    if result.metrics is None or layer is None:
        return result
    pair = sides.read_rows(layer, site)
    if pair is None or pair[0].numel() == 0:
        return replace(result, metrics=None, own_input_metrics=result.metrics, classic_failures=())
    golden, port = pair
    if site is Site.ROUTER_WEIGHTS:
        golden, port = _align(pair, sides.read_rows(layer, Site.ROUTER_EXPERTS))
    places = sides.batch.places(sides.reference.read(layer, site), site)
    return measure_golden(result, golden, port, places, criteria=sides.criteria)


def _align(
    weights: tuple[torch.Tensor, torch.Tensor], experts: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort router weights [T,k] alike on both sides: by expert, or by size if a side hides its experts."""
    if experts is None:
        return align_by_size(weights[0]), align_by_size(weights[1])
    return align_by_expert(weights[0], experts[0]), align_by_expert(weights[1], experts[1])
