"""Judgement of a layer, of a golden and a port that are a few tensors in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.judging.layer_judge import LayerJudge
from compare.judging.port_choice import Replay
from compare.judging.routing import align_by_expert, align_by_size
from compare.limits.criteria import OUTPUTS_ALONE, Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.noise.rows import InputError, Rows, square_difference
from compare.sides.captured_input import CapturedInput
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.source import CaptureSource
from minimax_tools.metrics.noise_floor import floor_statistics
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.router import Router, weigh_experts
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS, EXPERT_MATRICES, GATE, expert_weight
from minimax_tools.reference.upcast import upcast_experts
from minimax_tools.results.results import SiteResult, SiteStatus

LAYER, EXPERTS, CHOSEN, HIDDEN, INNER = 3, 6, 2, 32, 16
SPEC: Any = SimpleNamespace(num_experts_per_tok=CHOSEN, graph=ModelGraph())
# The second prompt is shorter.
MASK = torch.tensor([[1] * 12, [1] * 9 + [0] * 3])
PAST_A_FLIP = (Site.ROUTER_WEIGHTS, Site.MOE_DELTA, Site.OUTPUT)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = {
    **{
        expert_weight(expert, name): random(
            *((HIDDEN, INNER) if name == "w2" else (INNER, HIDDEN)), seed=10 * expert + number
        )
        / 6.0
        for expert in range(EXPERTS)
        for number, name in enumerate(EXPERT_MATRICES)
    },
    GATE: random(EXPERTS, HIDDEN, seed=101) / 6.0,
    # One token's choice, and no other, is within the noise.
    CORRECTION_BIAS: 0.01 * random(EXPERTS, seed=156),
}


class MemoryCapture(CaptureSource):
    """A capture of one layer, in memory; `changes` replace its tensors, None removes one."""

    def __init__(
        self,
        tensors: Mapping[Site, torch.Tensor],
        *,
        twin: Mapping[Site, torch.Tensor] | None = None,
        floor: Mapping[str, torch.Tensor] | None = None,
        hidden: tuple[Site, ...] = (),
        mask: torch.Tensor = MASK,
    ) -> None:
        self.directory = Path("memory")
        self._tensors, self._twin, self._floor, self._hidden = tensors, twin or {}, floor or {}, hidden
        self._mask = mask

    @property
    def layers(self) -> tuple[int, ...]:
        return (LAYER,)

    def sites(self, layer: int) -> tuple[Site, ...]:
        return tuple(self._tensors)

    def read(self, layer: int | None, site: Any) -> torch.Tensor:
        return self._tensors[site]

    def read_attention_mask(self) -> torch.Tensor:
        return self._mask

    def read_twin(self, layer: int | None, site: Any) -> torch.Tensor | None:
        return self._twin.get(site)

    def read_floor(self, layer: int | None, name: str) -> torch.Tensor | None:
        return self._floor.get(name)

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        return self._hidden


class Weights:
    """The layer's weights."""

    @contextmanager
    def open_layer(self, layer: int, reference: object) -> Iterator[Any]:
        yield SimpleNamespace(tensors=WEIGHTS, spec=SPEC)


def compute(
    states: torch.Tensor, stream: torch.Tensor, experts: torch.Tensor | None = None
) -> dict[Site, torch.Tensor]:
    """Compute the layer behind its second norm in float32, with the experts that it chooses or with those given."""
    batch = states.shape[:2]
    logits = states @ WEIGHTS[GATE].T
    if experts is None:
        experts = (logits.sigmoid() + WEIGHTS[CORRECTION_BIAS]).topk(CHOSEN, dim=-1).indices
    shares = weigh_experts(SPEC.graph, logits.flatten(0, 1), experts.flatten(0, 1))
    added = upcast_experts(
        WEIGHTS, states.flatten(0, 1), experts.flatten(0, 1), shares, graph=SPEC.graph
    ).unflatten(0, batch)
    return {
        Site.ATTN_RESIDUAL: stream,
        Site.POST_NORM: states,
        Site.ROUTER_LOGITS: logits,
        Site.ROUTER_EXPERTS: experts,
        Site.ROUTER_WEIGHTS: shares.unflatten(0, batch),
        Site.MOE_DELTA: added,
        Site.OUTPUT: stream + added,
    }


STATES, STREAM = random(2, 12, HIDDEN, seed=1), random(2, 12, HIDDEN, seed=2)
TWIN = compute(STATES, STREAM)
BFLOAT16 = (Site.ATTN_RESIDUAL, Site.POST_NORM, Site.MOE_DELTA, Site.OUTPUT)


def rounded(exact: Mapping[Site, torch.Tensor], *, seed: int) -> dict[Site, torch.Tensor]:
    """Return a right BF16 implementation's values: rounding errors of its own, and the exact choice."""
    found = {}
    for number, (site, values) in enumerate(exact.items()):
        if site is Site.ROUTER_EXPERTS:
            found[site] = values
            continue
        noisy = values * (1.0 + 2e-3 * random(*values.shape, seed=seed + number))
        found[site] = noisy.bfloat16() if site in BFLOAT16 else noisy
    return found


GOLDEN = rounded(TWIN, seed=20)
PORT = rounded(TWIN, seed=40)
FLOOR = floor_statistics(GOLDEN, TWIN, attention_mask=MASK, router=Router.of(SPEC, WEIGHTS))


def without(tensors: Mapping[Any, torch.Tensor], *names: object) -> dict[Any, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def sides_of(
    port: Mapping[Site, torch.Tensor] = PORT,
    *,
    golden: Mapping[Site, torch.Tensor] = GOLDEN,
    floor: str = "full",
    criteria: str = "noise",
    hidden: tuple[Site, ...] = (),
    has_weights: bool = False,
) -> Sides:
    reference = MemoryCapture(
        golden, twin=TWIN if floor == "full" else None, floor=FLOOR if floor != "off" else None
    )
    target = MemoryCapture(port, hidden=hidden)
    return Sides(
        reference=reference,
        target=target,
        batch=Batch.of(reference, target),
        criteria=Criteria(name=criteria, rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        weights=Weights() if has_weights else None,  # type: ignore[arg-type]
    )


def judge_of(*arguments: Any, error: InputError | None = None, **options: Any) -> LayerJudge:
    known = CapturedInput(known=(), error=error)
    return LayerJudge(sides_of(*arguments, **options), layer=LAYER, layer_input=known)


def margins() -> list[tuple[int, int]]:
    """Real tokens, those with the smallest margin first."""
    margin = FLOOR["router_margin"].masked_fill(~MASK.bool(), math.inf)
    order = margin.flatten().argsort()[: int(MASK.sum())].tolist()
    return [(index // 12, index % 12) for index in order]


def flipped(rank: int, *, is_exact: bool = True) -> dict[Site, torch.Tensor]:
    """Return a port whose token of that rank chose the next expert, and computed on with it."""
    scores = TWIN[Site.ROUTER_LOGITS].sigmoid() + WEIGHTS[CORRECTION_BIAS]
    place = margins()[rank]
    experts = TWIN[Site.ROUTER_EXPERTS].clone()
    experts[place] = scores[place].topk(CHOSEN + 1).indices[[0, 2]]
    port = rounded(compute(STATES, STREAM, experts), seed=40)
    if not is_exact:
        port[Site.MOE_DELTA][place] *= 1.3
        port[Site.OUTPUT][place] = port[Site.OUTPUT][place] * 1.3
    return port


def status_of(judge: LayerJudge, site: Site) -> SiteStatus:
    return judge.judge(site).status


def counts(judge: LayerJudge, site: Site) -> tuple[SiteStatus, int, int]:
    """Status of a site, and how many of its tokens were set aside and replayed."""
    result = judge.judge(site)
    return result.status, result.num_set_aside, result.num_replayed


def rows_of(judge: LayerJudge, site: Site) -> Rows:
    rows = judge.judged_rows(site)
    assert rows is not None
    return rows


def assert_same(rows: Rows, *tensors: torch.Tensor) -> None:
    """Assert the rows of golden, port and twin."""
    for found, expected in zip((rows.reference, rows.target, rows.twin), tensors, strict=False):
        assert found is not None
        assert torch.equal(found, expected)


class TestStatuses:
    @pytest.mark.parametrize("floor", ["full", "stats", "off"])
    def test_a_right_port_passes_everywhere(self, floor: str) -> None:
        judge = judge_of(floor=floor)
        found = {site: judge.judge(site) for site in PORT}
        assert {result.status for result in found.values()} == {SiteStatus.PASS}
        assert {result.num_set_aside for result in found.values()} == {0}
        assert (judge.router_noise is None) == (floor == "off")
        values = found[Site.MOE_DELTA]
        assert (values.noise is None) == (floor == "off")
        if values.noise is not None:
            assert values.noise.is_estimated == (floor == "stats")
            assert 0.7 < values.noise.whole < 1.4

    def test_classic_limits_judge_the_output_alone(self) -> None:
        judge = judge_of(criteria="classic")
        assert status_of(judge, Site.MOE_DELTA) is SiteStatus.NOT_JUDGED
        experts = judge.judge(Site.ROUTER_EXPERTS)
        assert (experts.status, experts.reason) == (SiteStatus.NOT_JUDGED, OUTPUTS_ALONE)
        assert experts.routing is not None
        flip = judge_of(flipped(0), criteria="classic", has_weights=True)
        assert counts(flip, Site.OUTPUT)[1:] == (0, 0)
        # Experts that the port's own logits do not give are no output either.
        assert flip.has_contradictions
        assert status_of(flip, Site.ROUTER_EXPERTS) is SiteStatus.NOT_JUDGED


class TestRows:
    REAL = MASK.bool()

    def test_are_the_real_tokens_of_both_sides(self) -> None:
        rows = judge_of().stored_rows(Site.MOE_DELTA)
        assert_same(rows, *(side[Site.MOE_DELTA][self.REAL] for side in (GOLDEN, PORT, TWIN)))
        assert torch.equal(rows.places, self.REAL.nonzero())
        assert rows.twin is not None
        assert rows.floor is not None
        expected = square_difference(rows.twin, rows.reference, massive=rows.massive)
        assert torch.equal(rows.floor.whole, expected.whole)
        assert (rows.widened_floor, rows.variant_averages, rows.input_error) == (None, None, None)
        assert rows.num_roundings == 1

    def test_weights_are_in_the_order_of_their_experts_or_else_of_their_size(self) -> None:
        experts = TWIN[Site.ROUTER_EXPERTS][self.REAL]
        weights = [side[Site.ROUTER_WEIGHTS][self.REAL] for side in (GOLDEN, PORT, TWIN)]
        turned = {site: PORT[site][..., [1, 0]] for site in (Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS)}
        rows = judge_of({**PORT, **turned}).stored_rows(Site.ROUTER_WEIGHTS)
        assert_same(rows, *(align_by_expert(side, experts) for side in weights))
        assert (rows.num_roundings, rows.floor) == (2, None)
        hidden = without(PORT, Site.ROUTER_EXPERTS)
        assert_same(judge_of(hidden).stored_rows(Site.ROUTER_WEIGHTS), *map(align_by_size, weights))
        for port, has_floor in (({**PORT, **turned}, True), (hidden, False)):
            stats = judge_of(port, floor="stats").stored_rows(Site.ROUTER_WEIGHTS)
            assert stats.twin is None
            assert stats.floor is not None or not has_floor

    def test_judged_ones_leave_out_what_is_set_aside_unless_it_can_be_replayed(self) -> None:
        judge = judge_of(flipped(0))
        assert judge.judged_rows(Site.ROUTER_EXPERTS) is None
        for site, number in ((Site.POST_NORM, 21), (Site.MOE_DELTA, 20), (Site.OUTPUT, 20)):
            assert rows_of(judge, site).num_tokens == number
        assert list(margins()[0]) not in rows_of(judge, Site.MOE_DELTA).places.tolist()
        assert judge_of(without(PORT, Site.OUTPUT)).judged_rows(Site.OUTPUT) is None
        replayed = judge_of(flipped(0), has_weights=True)
        rows, stored = rows_of(replayed, Site.MOE_DELTA), replayed.stored_rows(Site.MOE_DELTA)
        assert rows.num_tokens == 21
        changed = (rows.reference != stored.reference).any(dim=1)
        assert stored.places[changed].tolist() == [[*margins()[0]]]
        assert judge_of(floor="off").judged_rows(Site.MOE_DELTA) is not None


class TestFlips:
    def test_within_noise_are_explained_and_set_aside_without_weights(self) -> None:
        judge = judge_of(flipped(0, is_exact=False))
        experts = judge.judge(Site.ROUTER_EXPERTS)
        assert experts.status is SiteStatus.PASS
        assert experts.routing is not None
        routing = experts.routing
        assert (routing.num_tokens, routing.num_flipped, routing.num_explained) == (21, 1, 1)
        for site in (Site.MOE_DELTA, Site.OUTPUT):
            assert counts(judge, site) == (SiteStatus.PASS, 1, 0)
        # The golden's logits give the weights of any choice: wrong ones fail.
        assert counts(judge, Site.ROUTER_WEIGHTS) == (SiteStatus.PASS, 0, 1)
        port = flipped(0)
        port[Site.ROUTER_WEIGHTS][margins()[0]] = torch.tensor([0.9, 0.1])
        assert counts(judge_of(port), Site.ROUTER_WEIGHTS) == (SiteStatus.FAIL, 0, 1)

    @pytest.mark.parametrize("floor", ["full", "stats", "off"])
    def test_are_judged_by_the_goldens_values_with_the_ports_experts(self, floor: str) -> None:
        judge = judge_of(flipped(0), floor=floor, has_weights=True)
        wrong = judge_of(flipped(0, is_exact=False), floor=floor, has_weights=True)
        assert {counts(judge, site) for site in PAST_A_FLIP} == {(SiteStatus.PASS, 0, 1)}
        assert status_of(wrong, Site.MOE_DELTA) is status_of(wrong, Site.OUTPUT) is SiteStatus.FAIL

    def test_beyond_noise_fail(self) -> None:
        hidden = judge_of(without(flipped(-1), Site.ROUTER_EXPERTS), hidden=(Site.ROUTER_EXPERTS,))
        assert status_of(hidden, Site.OUTPUT) is SiteStatus.FAIL
        result = judge_of(flipped(-1)).judge(Site.ROUTER_EXPERTS)
        assert result.status is SiteStatus.FAIL
        assert result.routing is not None
        assert (result.routing.num_explained, result.routing.worst_flips[0].row) == (0, margins()[-1][0])

    def test_of_all_tokens_leave_no_output_to_judge(self) -> None:
        # The experts with the lowest logits.
        others = TWIN[Site.ROUTER_LOGITS].sort(dim=-1).indices[..., :CHOSEN]
        judge = judge_of({**PORT, Site.ROUTER_EXPERTS: others, Site.MOE_DELTA: 0.5 * PORT[Site.MOE_DELTA]})
        assert status_of(judge, Site.ROUTER_EXPERTS) is SiteStatus.FAIL
        assert status_of(judge, Site.MOE_DELTA) is SiteStatus.NOT_JUDGED

    def test_that_the_ports_own_logits_do_not_give_contradict_them(self) -> None:
        judge = judge_of(flipped(0), has_weights=True)
        assert judge.has_contradictions
        expected = TWIN[Site.ROUTER_LOGITS][MASK.bool()].sigmoid() + WEIGHTS[CORRECTION_BIAS]
        scores = self.scores(judge)
        assert scores is not None
        assert torch.allclose(scores, expected)
        experts, (row, token) = judge.judge(Site.ROUTER_EXPERTS), margins()[0]
        assert experts.status is SiteStatus.FAIL
        told = "than the port's own logits and the checkpoint's correction bias give"
        assert told in experts.reason
        assert f"row {row}, token {token}" in experts.reason
        assert judge_of(flipped(0)).has_contradictions is False
        assert judge_of(without(PORT, Site.ROUTER_EXPERTS), has_weights=True).has_contradictions is False
        # Without flips or weights, scores are not needed.
        assert self.scores(judge_of(has_weights=True)) is None
        assert self.scores(judge_of(flipped(0))) is None
        assert self.scores(judge_of(flipped(0), criteria="classic")) is None
        assert judge_of(flipped(0), floor="off", has_weights=True).choice_noise is None

    @staticmethod
    def scores(judge: LayerJudge) -> torch.Tensor | None:
        noise = judge.choice_noise
        assert noise is not None
        return noise.scores


class TestHiddenChoice:
    HIDDEN = (Site.ROUTER_EXPERTS,)

    def port(self, *more: Site) -> dict[Site, torch.Tensor]:
        return without(flipped(0), Site.ROUTER_EXPERTS, *more)

    def test_without_weights_fragile_tokens_are_set_aside(self) -> None:
        judge = judge_of(self.port(), hidden=self.HIDDEN)
        noise = judge.router_noise
        assert noise is not None
        for site in (Site.MOE_DELTA, Site.OUTPUT):
            assert judge.judge(site).num_set_aside == int(noise.is_fragile().sum()) == 1
        assert judge.judge(Site.POST_NORM).num_set_aside == 0
        assert judge.experts is None

    def test_with_weights_the_nearest_choice_is_judged(self) -> None:
        """A port whose token chose the next expert, within noise: it is judged with that choice."""
        more = (Site.ROUTER_LOGITS, Site.POST_NORM)
        right = judge_of(self.port(*more), hidden=(*self.HIDDEN, *more), has_weights=True)
        assert counts(right, Site.OUTPUT) == (SiteStatus.PASS, 0, 1)
        port = without(flipped(0, is_exact=False), Site.ROUTER_EXPERTS, *more)
        wrong = judge_of(port, hidden=(*self.HIDDEN, *more), has_weights=True).judge(Site.OUTPUT)
        assert (wrong.status, wrong.num_set_aside) == (SiteStatus.FAIL, 0)
        assert wrong.noise is not None
        assert wrong.noise.worst_token == margins()[0]

    def test_without_a_floor_and_weights_limits_know_that_flips_are_hidden(self) -> None:
        judge = judge_of(self.port(), hidden=self.HIDDEN, floor="off")
        hides = [judge.limit_context(site).hides_flips for site in (Site.POST_NORM, *PAST_A_FLIP)]
        assert hides == [False, True, True, True]
        shown = judge_of(floor="off")
        assert not shown.limit_context(Site.OUTPUT).hides_flips
        derived = judge_of(self.port(), hidden=self.HIDDEN, floor="off", has_weights=True)
        assert not derived.limit_context(Site.OUTPUT).hides_flips


class TestInheritedError:
    ERROR = InputError(overall=0.01, tokens=torch.linspace(0.005, 0.05, 21).double())

    def test_it_widens_the_routers_noise_in_proportion_to_the_logits(self) -> None:
        def widening(**options: Any) -> torch.Tensor | None:
            noise = judge_of(**options).router_noise
            assert noise is not None
            return noise.widening

        logits = GOLDEN[Site.ROUTER_LOGITS][MASK.bool()].double()
        usual = FLOOR["router_logits.error"][MASK.bool()].double().square().mean()
        added = (self.ERROR.inherited * logits.norm(dim=-1)).square()
        found = widening(error=self.ERROR)
        assert found is not None
        assert torch.allclose(found, ((usual + added) / usual).sqrt())
        assert widening() is None
        assert widening(golden=without(GOLDEN, Site.ROUTER_LOGITS), error=self.ERROR) is None

    def test_it_is_told_with_the_site(self) -> None:
        result = judge_of(error=self.ERROR).judge(Site.MOE_DELTA)
        assert result.noise is not None
        assert result.noise.incoming == 0.01
        floorless = judge_of(error=self.ERROR, floor="off").judge(Site.MOE_DELTA)
        assert floorless.relative is not None
        assert floorless.relative.incoming == 0.01


class TestReplay:
    def replay(self, port: Mapping[Site, torch.Tensor], **options: Any) -> Replay:
        sides = sides_of(port, has_weights=options.pop("has_weights", True), **options)
        golden, own = (
            capture.read(LAYER, Site.ROUTER_EXPERTS)[MASK.bool()]
            for capture in (sides.reference, sides.target)
        )
        return Replay(sides, layer=LAYER, experts=(golden, own))

    def test_values_are_the_exact_ones_of_the_ports_experts(self) -> None:
        port = flipped(0)
        exact = compute(STATES, STREAM, port[Site.ROUTER_EXPERTS])
        replay = self.replay(port)
        for site in (Site.MOE_DELTA, Site.OUTPUT):
            rows = judge_of(port).stored_rows(site)
            found, tokens = replay.rows(site, rows), replay.tokens(site)
            assert found.twin is not None
            assert torch.allclose(found.twin, exact[site][MASK.bool()], atol=1e-5)
            assert tokens.sum() == 1
            golden, twin = found.reference[tokens].float(), found.twin[tokens]
            assert 1e-5 < float((golden - twin).norm() / twin.norm()) < 1e-2
            assert torch.equal(found.reference[~tokens], rows.reference[~tokens])
            floor = square_difference(twin, golden, massive=rows.massive)
            assert found.floor is not None
            assert torch.allclose(found.floor.whole[tokens], floor.whole, rtol=0.2)
        # Weights follow from the logits alone.
        alone = self.replay(port, has_weights=False)
        found = alone.rows(Site.ROUTER_WEIGHTS, judge_of(port).stored_rows(Site.ROUTER_WEIGHTS))
        tokens = alone.tokens(Site.ROUTER_WEIGHTS)
        expected = align_by_expert(exact[Site.ROUTER_WEIGHTS], exact[Site.ROUTER_EXPERTS])[MASK.bool()]
        assert found.twin is not None
        assert torch.allclose(found.twin[tokens], expected[tokens], atol=1e-6)
        assert not torch.equal(found.reference[tokens], found.twin[tokens])

    def test_what_is_not_known_is_not_replayed(self) -> None:
        port = flipped(0)

        def numbers(**options: Any) -> list[int]:
            replay = self.replay(port, **options)
            return [int(replay.tokens(site).sum()) for site in PAST_A_FLIP]

        assert numbers() == [1, 1, 1]
        assert numbers(has_weights=False) == [1, 0, 0]
        assert numbers(golden=without(GOLDEN, Site.POST_NORM), floor="off") == [1, 0, 0]
        assert numbers(golden=without(GOLDEN, Site.ATTN_RESIDUAL)) == [1, 1, 1]
        assert numbers(golden=without(GOLDEN, Site.ATTN_RESIDUAL, Site.MOE_DELTA)) == [1, 1, 0]
        assert numbers(golden=without(GOLDEN, Site.ROUTER_LOGITS), floor="off") == [0, 0, 0]

    @pytest.mark.parametrize(("expert", "number"), [(-1, 0), (0, 1), (EXPERTS - 1, 1), (EXPERTS, 0)])
    def test_numbers_that_are_no_expert_s_are_not_replayed(self, expert: int, number: int) -> None:
        port = {**PORT, Site.ROUTER_EXPERTS: PORT[Site.ROUTER_EXPERTS].clone()}
        other = next(place for place in margins() if expert not in port[Site.ROUTER_EXPERTS][place].tolist())
        port[Site.ROUTER_EXPERTS][other][0] = expert
        assert int(self.replay(port).tokens(Site.MOE_DELTA).sum()) == number


def test_choice_is_judged_with_the_places_of_real_tokens() -> None:
    judge = judge_of(flipped(-1))
    assert torch.equal(judge.choice_places(), MASK.bool().nonzero())
    blank = SiteResult(layer=LAYER, site="router_experts", status=SiteStatus.FAIL)
    experts = judge.experts
    assert experts is not None
    same = judge.judge_choice(blank, experts[1], judge.router_noise)
    assert (same.status, same.reason) == (SiteStatus.PASS, "")
    assert replace(same, routing=None, status=SiteStatus.FAIL) == blank
