"""Trials of hypotheses on a layer of a few numbers: which tokens count, and what is predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.catalogue.mistake import Hypothesis
from compare.diagnosis.score import Score
from compare.diagnosis.trial import Trial, settled_tokens
from compare.noise.yardstick import Yardstick
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import EXPERT_MATRICES, expert_weight
from minimax_tools.reference.evaluation import (
    Change,
    Evaluation,
    ExpertValue,
    GraphNode,
    LayerInputs,
    Stage,
    replace_stage,
)
from minimax_tools.reference.expert_pass import LayerWeights

NUM_TOKENS, WIDTH, NUM_EXPERTS = 8, 4, 4
ALL = torch.ones(NUM_TOKENS, dtype=torch.bool)
LATE = torch.arange(NUM_TOKENS) >= 2


def inputs(num_tokens: int = NUM_TOKENS) -> LayerInputs:
    spec: Any = SimpleNamespace(
        num_experts_per_tok=1, hidden_size=WIDTH, num_local_experts=NUM_EXPERTS, graph=ModelGraph()
    )
    # Matrices of experts are square here.
    matrices = {
        expert_weight(n, name): torch.ones(WIDTH, WIDTH)
        for n in range(NUM_EXPERTS)
        for name in EXPERT_MATRICES
    }
    return LayerInputs(
        graph=ModelGraph().layer(0),
        spec=spec,
        weights=LayerWeights(matrices),
        attention_mask=torch.ones(1, num_tokens, dtype=torch.int64),
        position_ids=10 + torch.arange(num_tokens)[None],
        decode_start=num_tokens,
    )


def filled(value: float) -> torch.Tensor:
    return torch.full((NUM_TOKENS, WIDTH), value)


def logits(margin: float) -> torch.Tensor:
    """Logits by which token t chooses expert t mod 4, with a margin above all others."""
    return margin * torch.nn.functional.one_hot(torch.arange(NUM_TOKENS) % NUM_EXPERTS).float()


def layer(*, margin: float = 9.0, attention: float = 1.0, experts: float = 2.0) -> Evaluation:
    """A layer whose output is the sum of two constants."""
    stages: dict[GraphNode, Stage] = {
        Site.Q_PROJ: lambda _: filled(1.0)[None],
        Site.ATTN_DELTA: lambda _: filled(attention),
        # The layer's input is 0.
        Site.ATTN_RESIDUAL: lambda found: found[Site.ATTN_DELTA],
        Site.ROUTER_LOGITS: lambda _: logits(margin),
        Site.ROUTER_EXPERTS: lambda found: found[Site.ROUTER_LOGITS].topk(1).indices,
        Site.ROUTER_WEIGHTS: lambda _: torch.ones(NUM_TOKENS, 1),
        ExpertValue.EXPERT_INPUT: lambda _: filled(0.0),
        ExpertValue.EXPERT_NUMBERS: lambda found: found[Site.ROUTER_EXPERTS],
        Site.MOE_DELTA: lambda _: filled(experts),
        Site.OUTPUT: lambda found: found[Site.ATTN_RESIDUAL] + found[Site.MOE_DELTA],
    }
    return Evaluation(inputs(), stages, tokens=torch.arange(NUM_TOKENS))


def yardstick(port: torch.Tensor, exact: float) -> Yardstick:
    return Yardstick(
        port=port,
        golden=filled(exact),
        exact=filled(exact),
        variance=torch.ones_like(port),
        dtype=torch.bfloat16,
    )


def trial(
    port: torch.Tensor | float = 3.0,
    *,
    site: Site = Site.OUTPUT,
    base: Evaluation | None = None,
    on_golden_values: Evaluation | None = None,
    is_decoded: torch.Tensor = ~ALL,
    is_usable: torch.Tensor = ALL,
) -> Trial:
    base = base or layer()
    port = filled(port) if isinstance(port, float) else port
    return Trial(
        base=base,
        on_golden_values=on_golden_values,
        yardsticks={site: yardstick(port, float(base.rows(site)[0, 0]))},
        logit_noise=0.1,
        is_decoded=is_decoded,
        is_usable=is_usable,
    )


def change_of(change: Change) -> Hypothesis:
    return Hypothesis(mistakes=(), parameters=(), change=change)


def set_to(site: Site, value: float) -> Hypothesis:
    whole = site.order < Site.ATTN_CONTEXT.order
    return change_of(replace_stage(site, lambda _: filled(value)[None] if whole else filled(value)))


def figures(scores: Sequence[Score]) -> list[tuple[bool, float]]:
    return [(score.is_decode_only, score.leaves) for score in scores]


# Squared norms over four channels, the noise being 0.006² of a channel's part; the right layer's variance is 1.
ROUNDED = 0.006**2


class TestJudging:
    def test_right_layer_has_the_error_of_the_port(self) -> None:
        null = trial(5.0).null()
        assert (null.leaves, null.unexplained, null.is_decode_only) == (2.0, 2.0, False)
        assert null.hypothesis.mistakes == ()

    def test_cause_leaves_nothing_and_each_hypothesis_has_its_score(self) -> None:
        hypotheses = [set_to(Site.MOE_DELTA, value) for value in (4.0, 3.0)]
        first, second = trial(5.0).judge(hypotheses)
        assert (first.hypothesis, second.hypothesis) == (hypotheses[0], hypotheses[1])
        assert (first.leaves, second.leaves) == (0.0, pytest.approx(1.0, rel=1e-3))

    @pytest.mark.parametrize(
        ("port", "parts", "value", "error", "growth"),
        [
            # The output grows from 3 to 1001, and errs by the growth of the experts' delta too.
            (0.0, {}, 1000.0, 1001.0, 1001**2 - 3**2 + 1000**2 - 2**2),
            # The output alone has grown, from 0 to 100; the deltas are no larger.
            (5.0, {"base": {"attention": 1000.0, "experts": -1000.0}}, -900.0, 95.0, 100**2),
            # Other sites err by their own size alone.
            (0.0, {"site": Site.MOE_DELTA}, 1000.0, 1000.0, 1000**2 - 2**2),
        ],
    )
    def test_larger_values_err_more(
        self, port: float, parts: dict[str, Any], value: float, error: float, growth: float
    ) -> None:
        base = layer(**parts.get("base", {}))
        (found,) = trial(port, **{**parts, "base": base}).judge([set_to(Site.MOE_DELTA, value)])
        assert found.leaves == pytest.approx(error / math.sqrt(1.0 + ROUNDED * growth), rel=1e-4)

    def test_values_as_large_as_right_ones_err_as_much(self) -> None:
        right = trial(3.0 + 1e-3)
        small = replace(right.yardsticks[Site.OUTPUT], variance=torch.full((NUM_TOKENS, WIDTH), 1e-6))
        (found,) = replace(right, yardsticks={Site.OUTPUT: small}).judge([set_to(Site.MOE_DELTA, 2.0)])
        assert found.leaves == pytest.approx(1.0, rel=1e-3)

    def test_decoded_tokens_are_scored_alone_too(self) -> None:
        port = torch.where(LATE[:, None], filled(5.0), filled(3.0))
        hypothesis = set_to(Site.MOE_DELTA, 4.0)
        assert figures(trial(port).judge([hypothesis])) == [(False, pytest.approx(math.sqrt(4 / 7), abs=0.3))]
        both = figures(trial(port, is_decoded=LATE).judge([hypothesis]))
        assert [is_decode_only for is_decode_only, _ in both] == [False, True]
        assert both[1][1] == 0.0
        assert both[0][1] > 0.5

    def test_tokens_that_noise_sends_to_other_experts_do_not_count(self) -> None:
        port = filled(1.0)
        port[0] = 99.0
        near = layer()
        close = logits(9.0)
        close[0, 1] = 9.0
        unsettled = near.changed(replace_stage(Site.ROUTER_LOGITS, lambda _: close))
        assert trial(port, site=Site.ATTN_DELTA).null().leaves == 0.0  # the worst token is trimmed
        port[1] = 99.0
        assert trial(port, site=Site.ATTN_DELTA).null().leaves > 9.0
        assert trial(port, site=Site.ATTN_DELTA, base=unsettled).null().leaves == 0.0
        # Under the hypothesis, token 0 is nearly tied: that counts behind the experts alone.
        hypothesis = change_of(replace_stage(Site.ROUTER_LOGITS, lambda _: close))
        (found,) = trial(port + 1.0, site=Site.MOE_DELTA).judge([hypothesis])
        (before,) = trial(port, site=Site.ATTN_DELTA).judge([hypothesis])
        assert (found.leaves, before.leaves > 9.0) == (0.0, True)
        assert not trial(port, site=Site.ATTN_DELTA, base=unsettled).settled[0]

    def test_decoded_mistake_does_not_unsettle_other_tokens(self) -> None:
        close = logits(9.0)
        close[0, 1] = close[2, 1] = 9.0
        port = filled(2.0)
        port[0] = port[1] = 99.0
        hypothesis = change_of(replace_stage(Site.ROUTER_LOGITS, lambda _: close))
        every, decoded = trial(port, site=Site.MOE_DELTA, is_decoded=LATE).judge([hypothesis])
        # Token 0 is not decoded, so it counts as in the right layer; one of two wrong tokens is trimmed.
        assert (every.leaves, decoded.leaves > 9.0) == (0.0, True)

    def test_tokens_that_are_not_usable_do_not_count(self) -> None:
        port = filled(3.0)
        port[:2] = torch.nan
        assert trial(port).null().leaves == math.inf
        assert trial(port, is_usable=LATE).null().leaves == 0.0

    def test_changed_attention_is_judged_where_no_site_is_behind_the_experts(self) -> None:
        (found,) = trial(5.0, site=Site.Q_PROJ).judge([set_to(Site.Q_PROJ, 5.0)])
        assert found.leaves == 0.0


class TestFaint:
    def test_nothing_is_tried_if_the_layer_inherits_errors(self) -> None:
        assert trial(5.0).judge_faint([set_to(Site.OUTPUT, 5.0)]) == []

    def test_difference_on_the_goldens_values_is_predicted(self) -> None:
        golden = layer(attention=1.5, experts=2.25)
        doubled = change_of(
            replace_stage(Site.OUTPUT, lambda found: 2.0 * (found[Site.ATTN_DELTA] + found[Site.MOE_DELTA]))
        )
        # The golden's values give 7.5 with the mistake and 3.75 without; the right layer has 3.
        port = trial(3.0 + 3.75, on_golden_values=golden, is_decoded=LATE)
        found = port.judge_faint([doubled, set_to(Site.OUTPUT, 3.75)])
        assert [score.is_decode_only for score in found] == [False, True] * 2
        assert [score.leaves for score in found[::2]] == [0.0, 3.75]

    def test_mistake_of_the_router_counts_all_usable_tokens(self) -> None:
        port = filled(1.0)
        port[:2] = 99.0
        near = layer(margin=0.0)
        router = change_of(replace_stage(Site.ROUTER_LOGITS, lambda _: logits(0.0)))
        other = change_of(replace_stage(Site.POST_NORM, lambda _: filled(3.0)))
        # All tokens are nearly tied, so none is settled.
        of_router, of_other = trial(port, site=Site.ATTN_DELTA, base=near, on_golden_values=near).judge_faint(
            [router, other]
        )
        assert 9.0 < of_router.leaves < math.inf
        assert of_other.leaves == math.inf
        (usable,) = trial(
            port, site=Site.ATTN_DELTA, base=near, on_golden_values=near, is_usable=LATE
        ).judge_faint([router])
        assert usable.leaves == 0.0


class TestRefuting:
    SITES = (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ, Site.Q_NORM, Site.K_NORM, Site.INPUT_NORM)

    def whole(self, value: float, sites: Sequence[Site]) -> Hypothesis:
        return change_of(Change(stages={site: (lambda _: filled(value)[None]) for site in sites}))

    def test_other_layer_is_refuted_by_a_site_before_attention(self) -> None:
        port = trial(1.0, site=Site.Q_PROJ)
        assert port.refutes(self.whole(11.01, self.SITES))
        assert not port.refutes(self.whole(10.99, self.SITES))
        # One changed site is no other layer.
        assert not port.refutes(self.whole(99.0, self.SITES[:1]))

    @pytest.mark.parametrize(("value", "is_refuted"), [(2.3, False), (2.5, True)])
    def test_right_site_that_a_hypothesis_makes_wrong_refutes_it(
        self, value: float, is_refuted: bool
    ) -> None:
        # Queries are wrong; the shown keys are right, with a variance of 1.
        port = replace(trial(9.0, site=Site.Q_PROJ), controls={Site.K_PROJ: yardstick(filled(1.0), 1.0)})
        stages = {Site.Q_PROJ: lambda _: filled(9.0)[None], Site.K_PROJ: lambda _: filled(value)[None]}
        assert port.refutes(change_of(Change(stages=stages))) is is_refuted
        # Where keys are not shown, they refute nothing.
        assert not trial(9.0, site=Site.Q_PROJ).refutes(change_of(Change(stages=stages)))

    def test_sites_behind_attention_refute_nothing(self) -> None:
        assert not trial(99.0, site=Site.ATTN_DELTA).refutes(self.whole(99.0, self.SITES))
        base = layer()
        base.set_value(Site.ATTN_CONTEXT, filled(1.0))
        context = trial(99.0, site=Site.ATTN_CONTEXT, base=base)
        changed = change_of(
            Change(stages={site: (lambda _: filled(1.0)) for site in (*self.SITES, Site.ATTN_CONTEXT)})
        )
        assert not context.refutes(changed)

    def test_tokens_that_are_not_usable_refute_nothing(self) -> None:
        port = filled(1.0)
        port[:2] = torch.nan
        assert trial(port, site=Site.Q_PROJ).refutes(self.whole(1.0, self.SITES))
        assert not trial(port, site=Site.Q_PROJ, is_usable=LATE).refutes(self.whole(1.0, self.SITES))


class TestWrongTokens:
    def test_tokens_above_three_times_the_noise_are_wrong(self) -> None:
        port = filled(3.0)
        port[2], port[5], port[6] = 6.01, 5.99, torch.nan
        found = trial(port).clues.wrong_tokens
        assert found.is_wrong.nonzero().flatten().tolist() == [2, 6]
        assert found.positions.tolist() == list(range(10, 18))
        assert found.experts.flatten().tolist() == [0, 1, 2, 3] * 2
        assert found.num_experts == NUM_EXPERTS

    def test_settled_tokens_alone_are_told(self) -> None:
        found = trial(9.0, is_usable=LATE).clues.wrong_tokens
        assert (len(found.is_wrong), found.positions[0], len(found.experts)) == (6, 12, 6)

    def test_worst_site_tells_a_token(self) -> None:
        wrong = filled(2.0)
        wrong[4] = 9.0
        yardsticks = {Site.MOE_DELTA: yardstick(wrong, 2.0), Site.OUTPUT: yardstick(filled(3.0), 3.0)}
        both = replace(trial(), yardsticks=yardsticks)
        assert both.clues.wrong_tokens.is_wrong.nonzero().flatten().tolist() == [4]


def test_some_tokens_of_a_trial_are_those_of_all_its_parts() -> None:
    golden = layer(attention=5.0)
    port = filled(3.0)
    port[5] = 7.0
    whole = trial(port, on_golden_values=golden, is_decoded=LATE, is_usable=LATE)
    few = whole.select_tokens(torch.tensor([1, 5]))
    assert few.base.tokens.tolist() == [1, 5]
    assert few.on_golden_values is not None
    assert few.on_golden_values.tokens.tolist() == [1, 5]
    assert few.yardsticks[Site.OUTPUT].port[:, 0].tolist() == [3.0, 7.0]
    assert (few.is_decoded.tolist(), few.is_usable.tolist()) == ([False, True], [False, True])
    assert trial().select_tokens(torch.tensor([1])).on_golden_values is None


def choosing(logits: list[float], number: int, k: int) -> Evaluation:
    """So many tokens with these logits, of which each chooses `k` experts."""
    stages: dict[GraphNode, Stage] = {
        Site.ROUTER_LOGITS: lambda _: torch.tensor(logits).repeat(number, 1),
        Site.ROUTER_EXPERTS: lambda found: found[Site.ROUTER_LOGITS].topk(k).indices,
    }
    return Evaluation(inputs(number), stages, tokens=torch.arange(number))


def test_tokens_are_settled_if_six_draws_of_twice_the_noise_change_nothing() -> None:
    # The difference of two draws has a standard deviation of 2√2 · noise: one draw keeps the order in 4 of 5 cases.
    evaluation = choosing([0.8416 * 2.0 * math.sqrt(2.0) * 0.1, 0.0], 6000, 1)
    settled = settled_tokens(evaluation, 0.1)
    assert float(settled.float().mean()) == pytest.approx(0.8**6, abs=0.02)
    assert torch.equal(settled, settled_tokens(evaluation, 0.1))
    assert bool(settled_tokens(evaluation, 0.0).all())
    # Experts in another order are the same.
    assert bool(settled_tokens(choosing([1.0, 1.0, -99.0], 50, 2), 0.1).all())
