"""The search's turns: which hypotheses are tried, on which tokens, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.catalogue.mistake import Hypothesis, Mistake
from compare.diagnosis.score import Score
from compare.diagnosis.search import SearchOutcome, search_layer
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import replace_stage

# Far from an explanation, but no worse than no mistake.
USUAL = {
    "leaves": 20.0,
    "unexplained": 20.0,
    "misfit": 400.0,
    "explains": 0.0,
    "amplitude": 1.0,
    "z": 0.0,
    "likeness": 0.1,
}
CAUSE = {"leaves": 1.0, "misfit": 1.0, "explains": 0.99, "z": 50.0, "likeness": 0.99}
WORSE = {"misfit": 401.0}
# An explanation that leaves too much to be proved.
UNPROVED = {**CAUSE, "leaves": 1.4, "misfit": 1.9}
# Of one prompt, the last token is among those that are evenly spread; so there is one less than 64.
PROVING, FIRST, SCREEN = 12, 24, 63


def mistake(name: str, site: Site = Site.Q_PROJ, **options: Any) -> Mistake:
    return Mistake(
        name=name,
        build=lambda **_: replace_stage(site, lambda _: torch.zeros(1)),
        **options,
    )


@dataclass
class Port:
    """A trial that gives each hypothesis the figures of its name, and notes what was tried on how many tokens.

    `on_proving` holds the figures that differ on the tokens that may prove a mistake.
    """

    figures: Mapping[str, Mapping[str, Any]]
    on_proving: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    null_figures: Mapping[str, float] = field(default_factory=dict)
    faint: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    num_tokens: int = 20
    num_usable: int = 20
    num_settled: int = 20
    refuted: frozenset[str] = frozenset()
    has_decoded: bool = False
    error: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    tried: list[tuple[int, list[str]]] = field(default_factory=list)
    tried_faint: list[tuple[int, list[str]]] = field(default_factory=list)
    selected: list[list[int]] = field(default_factory=list)

    @property
    def base(self) -> Any:
        mask = torch.ones(1, self.num_tokens, dtype=torch.int64)
        return SimpleNamespace(
            tokens=torch.arange(self.num_tokens), attention_mask=mask, inputs=SimpleNamespace(is_judged=mask)
        )

    @property
    def is_usable(self) -> torch.Tensor:
        return torch.arange(self.num_tokens) < self.num_usable

    @property
    def settled(self) -> torch.Tensor:
        return torch.arange(self.num_tokens) < self.num_settled

    def select_tokens(self, indices: torch.Tensor) -> Port:
        self.selected.append(indices.tolist())
        return replace(self, num_tokens=len(indices))

    def null(self) -> Score:
        nothing = SimpleNamespace(name="", is_named=True, mistakes=())
        return self.score(nothing, {"misfits": torch.zeros(self.num_tokens), **self.null_figures})

    @property
    def clues(self) -> Any:
        return "clues"

    def refutes(self, hypothesis: Hypothesis) -> bool:
        return hypothesis.name in self.refuted

    def score(self, hypothesis: Any, figures: Mapping[str, Any], *, is_decode_only: bool = False) -> Score:
        return Score(hypothesis=hypothesis, is_decode_only=is_decode_only, **{**USUAL, **figures})

    def judge(self, hypotheses: Sequence[Hypothesis], *, keeps_predicted: bool = False) -> list[Score]:
        self.tried.append((self.num_tokens, [hypothesis.name for hypothesis in hypotheses]))
        figures = {**self.figures, **(self.on_proving if self.num_tokens == PROVING else {})}
        scores = []
        for hypothesis in hypotheses:
            scores.append(self.score(hypothesis, figures.get(hypothesis.name, {})))
            if self.has_decoded:
                decoded = figures.get(f"decoded {hypothesis.name}", {})
                scores.append(self.score(hypothesis, decoded, is_decode_only=True))
        return scores

    def judge_faint(self, hypotheses: Sequence[Hypothesis]) -> list[Score]:
        self.tried_faint.append((self.num_tokens, [hypothesis.name for hypothesis in hypotheses]))
        return [self.score(hypothesis, self.faint.get(hypothesis.name, {})) for hypothesis in hypotheses]


def search(
    port: Port,
    *mistakes: Mistake,
    suspects: frozenset[Site] = frozenset(),
    expected: Sequence[Hypothesis] = (),
    is_seen: bool = False,
) -> SearchOutcome:
    trial: Any = port
    return search_layer(trial, mistakes, suspects=suspects, expected=expected, is_seen=is_seen)


def named(outcome: SearchOutcome) -> list[str]:
    return [score.hypothesis.name for score in outcome.named]


def nearest(outcome: SearchOutcome) -> list[str]:
    return [score.hypothesis.name for score in outcome.nearest]


def singles(port: Port) -> list[list[str]]:
    """Names of the turns' hypotheses; without empty turns and pairs."""
    return [names for _, names in port.tried if names and not any("+" in name for name in names)]


def many(number: int, **options: Any) -> list[Mistake]:
    return [mistake(f"m{index}", **options) for index in range(number)]


class TestTurns:
    def test_nothing_is_tried_if_no_token_is_usable(self) -> None:
        port = Port({"a": CAUSE}, num_usable=0)
        outcome = search(port, mistake("a"))
        assert (port.tried, outcome.named, outcome.nearest, outcome.num_tried) == ([], (), (), 0)

    def test_one_usable_token_is_enough(self) -> None:
        assert named(search(Port({"a": CAUSE}, num_usable=1), mistake("a"))) == ["a"]

    def test_mistakes_at_blamed_sites_are_tried_first(self) -> None:
        cause = {**CAUSE, "leaves": 1.4}
        port = Port({"at": cause})
        others = mistake("other"), mistake("at", Site.K_PROJ)
        outcome = search(port, *others, suspects=frozenset({Site.K_PROJ}))
        assert (named(outcome), outcome.num_tried, singles(port)) == (["at"], 1, [["at"]])
        # What the blamed site rules out is tried only where the error is so small that another site may hide it.
        for unexplained, found in ((6.1, []), (6.0, ["other"])):
            port = Port({"other": cause}, null_figures={"unexplained": unexplained})
            assert named(search(port, *others, suspects=frozenset({Site.K_PROJ}))) == found
            assert singles(port)[:2] == [["at"], *([found] if found else [])]

    def test_expected_mistakes_come_before_all_and_must_be_proved(self) -> None:
        one, other = mistake("one"), mistake("other")
        for leaves, turns in ((1.3, [["one", "one"]]), (1.4, [["one", "one"], ["other"]])):
            port = Port({"one": {**CAUSE, "leaves": leaves}})
            assert named(search(port, other, one, expected=[one.with_parameters({})])) == ["one"]
            assert singles(port) == turns

    def test_expected_mistakes_need_no_proof_if_nothing_else_is_tried(self) -> None:
        one = mistake("one")
        port = Port({"one": {**CAUSE, "leaves": 1.4}})
        outcome = search(port, one, expected=[one.with_parameters({})])
        assert (named(outcome), outcome.num_tried, port.tried_faint) == (["one"], 2, [])

    def test_wrong_weights_that_were_seen_are_named_at_once_or_not_at_all(self) -> None:
        others = (
            mistake("at", Site.K_PROJ),
            mistake("other"),
            mistake("late", Site.K_PROJ, find_at_last=lambda _: ({},)),
        )
        faint = {"leaves": 6.0, "unexplained": 6.0}
        for cause, found in (("at", ["at"]), ("other", []), ("at + other", [])):
            port = Port({cause: CAUSE}, null_figures=faint)
            outcome = search(port, *others, suspects=frozenset({Site.K_PROJ}), is_seen=True)
            assert (named(outcome), singles(port), port.tried_faint) == (found, [["at", "late"]], [])

    def test_refuted_hypotheses_are_not_tried(self) -> None:
        port = Port({"a": CAUSE}, refuted=frozenset({"a"}))
        assert named(search(port, mistake("a"), mistake("b"))) == []
        assert singles(port) == [["b"]]

    def test_hypotheses_that_the_values_give_are_tried_too(self) -> None:
        def find(clues: Any) -> tuple[Mapping[str, int], ...]:
            assert clues == "clues"
            return ({},)

        options: dict[str, Any] = {"candidates": lambda _: (), "find": find}
        port = Port({"of experts": UNPROVED}, num_tokens=200)
        found = mistake("of attention", **options), mistake("of experts", Site.MOE_DELTA, **options)
        assert named(search(port, *found)) == ["of experts"]
        # Few tokens need not hold those of two experts.
        assert port.tried[0] == (200, ["of experts"])
        assert port.tried[1] == (PROVING, ["of attention"])


class TestTokens:
    @pytest.mark.parametrize(
        ("num_tokens", "counts"),
        [(36, {36}), (37, {FIRST, 37}), (96, {FIRST, 96}), (97, {FIRST, SCREEN, 97})],
    )
    def test_few_tokens_screen_many_hypotheses(self, num_tokens: int, counts: set[int]) -> None:
        port = Port({"a": UNPROVED}, num_tokens=num_tokens, null_figures={"leaves": 9.9})
        assert named(search(port, mistake("a"))) == ["a"]
        assert {count for count, names in port.tried if names} == counts

    def test_thirty_go_on_and_ten_of_them_are_judged_on_all_tokens(self) -> None:
        figures = {f"m{index}": {"misfit": 401.0 + index, "z": 0.0} for index in range(50)}
        port = Port(figures, num_tokens=200)
        search(port, *many(50))
        tried = {count: names for count, names in reversed(port.tried) if names and "+" not in names[0]}
        assert tried[PROVING] == [f"m{index}" for index in range(50)]
        assert tried[SCREEN] == [f"m{index}" for index in range(30)]
        assert tried[200] == [f"m{index}" for index in range(10)]

    def test_all_that_are_better_than_no_mistake_go_on(self) -> None:
        figures = {f"m{index}": {"misfit": 399.0} for index in range(40)} | {"m40": WORSE}
        port = Port(figures, num_tokens=200)
        search(port, *many(41))
        assert next(len(names) for count, names in port.tried if count == SCREEN) == 40

    def test_those_with_a_fitted_parameter_go_on_by_likeness(self) -> None:
        figures: dict[str, Mapping[str, float]] = {f"m{index}": WORSE for index in range(30)}
        figures |= {f"f{index}": {"misfit": 500.0, "likeness": 0.3 + index / 10} for index in range(5)}
        fitted = [
            mistake(f"f{index}", fitted="factor", candidates=lambda _: ({"factor": 2.0},))
            for index in range(5)
        ]
        port = Port(figures, num_tokens=200)
        search(port, *many(30), *fitted)
        screened = next(names for count, names in port.tried if count == SCREEN)
        assert screened[:30] == [f"m{index}" for index in range(30)]
        assert set(screened[30:]) == {"f1", "f2", "f3", "f4"}

    def test_five_go_on_by_z_of_either_sign(self) -> None:
        figures = {f"m{index}": {"misfit": 401.0 + index, "z": 0.0} for index in range(30)}
        for index in range(20, 26):
            figures[f"m{index}"]["z"] = (-1) ** index * float(index)
        port = Port(figures, num_tokens=200)
        search(port, *many(30))
        judged = next(names for count, names in port.tried if count == 200 and names)
        assert judged[:10] == [f"m{index}" for index in range(10)]
        assert judged[10:] == ["m25", "m24", "m23", "m22", "m21"]

    def test_decoded_tokens_are_judged_where_they_alone_come_near(self) -> None:
        figures = {"a": WORSE, "decoded a": CAUSE, "b": {"misfit": 900.0}, "decoded b": {"misfit": 900.0}}
        port = Port(figures, num_tokens=200, has_decoded=True)
        outcome = search(port, mistake("a"), mistake("b"))
        assert [(score.hypothesis.name, score.is_decode_only) for score in outcome.named] == [("a", True)]


class TestProofOnFewestTokens:
    def test_mistake_that_the_fewest_tokens_prove_is_judged_on_all_and_ends_the_search(self) -> None:
        port = Port({"m5": CAUSE}, num_tokens=200)
        outcome = search(port, *many(9))
        assert (named(outcome), outcome.num_tried) == (["m5"], 9)
        (first_count, first), (last_count, last) = (turn for turn in port.tried if turn[1])
        assert (first_count, len(first), last_count, last[0]) == (PROVING, 9, 200, "m5")

    def test_near_ones_and_the_most_alike_are_judged_beside_it(self) -> None:
        figures = {"m0": CAUSE, "m1": {**CAUSE, "misfit": 1.01}}
        on_proving = {
            "m0": {**CAUSE, "misfit": 1.5, "likeness": 0.2},
            "m1": {**CAUSE, "likeness": 0.3},
            "m2": {**CAUSE, "misfit": 1.51, "likeness": 0.2},
            **{f"m{number}": {"likeness": number / 10} for number in range(3, 8)},
        }
        port = Port(figures, on_proving=on_proving, num_tokens=200)
        assert named(search(port, *many(9))) == ["m0", "m1"]
        assert port.tried[-1] == (200, ["m0", "m1", "m7", "m6", "m5", "m4"])

    def test_one_that_is_less_like_the_error_than_another_does_not_end_the_search(self) -> None:
        unlike = {**CAUSE, "likeness": 0.5}
        port = Port({"m0": unlike, "m1": {"likeness": 0.7}}, num_tokens=200)
        assert named(search(port, *many(5))) == []
        assert any(count == SCREEN for count, _ in port.tried)

    def test_search_goes_on_if_all_tokens_do_not_prove_it(self) -> None:
        port = Port({"b": CAUSE}, on_proving={"a": CAUSE, "b": {}}, num_tokens=200)
        assert named(search(port, mistake("a"), mistake("b"))) == ["b"]
        port = Port({"a": UNPROVED, "b": CAUSE}, on_proving={"a": CAUSE, "b": {}}, num_tokens=200)
        search(port, mistake("a"), *many(5), mistake("b"))
        assert any(count == SCREEN for count, _ in port.tried)

    @pytest.mark.parametrize(("num_unjudged", "is_ended"), [(10, True), (11, False)])
    def test_what_too_few_tokens_judge_is_judged_beside_it(self, num_unjudged: int, is_ended: bool) -> None:
        on_proving = {f"m{number}": {"misfit": math.inf, "likeness": 0.0} for number in range(num_unjudged)}
        port = Port({"a": CAUSE, "m9": CAUSE}, on_proving=on_proving, num_tokens=200)
        assert set(named(search(port, *many(20), mistake("a")))) == {"a", "m9"}
        assert (not any(count == SCREEN for count, _ in port.tried)) is is_ended
        if is_ended:
            assert set(port.tried[-1][1]) >= {f"m{number}" for number in range(num_unjudged)}

    def test_mistake_of_decoded_tokens_alone_is_proved_as_such(self) -> None:
        port = Port({"decoded a": CAUSE}, num_tokens=200, has_decoded=True)
        outcome = search(port, mistake("a"), mistake("b"))
        assert [(score.hypothesis.name, score.is_decode_only) for score in outcome.named] == [("a", True)]
        assert {count for count, names in port.tried if names} == {PROVING, 200}

    def test_hypotheses_that_the_values_give_end_the_search_if_all_tokens_prove_them(self) -> None:
        found = mistake("of experts", Site.MOE_DELTA, candidates=lambda _: (), find=lambda _: ({},))
        for cause, is_ended in ((CAUSE, True), (UNPROVED, False)):
            port = Port({"of experts": cause}, num_tokens=200)
            assert named(search(port, mistake("a"), found)) == ["of experts"]
            assert (port.tried == [(200, ["of experts"])]) is is_ended

    def test_longer_search_of_the_values_comes_last(self) -> None:
        found = mistake("of experts", Site.MOE_DELTA, candidates=lambda _: (), find_at_last=lambda _: ({},))
        port = Port({"of experts": UNPROVED}, num_tokens=200)
        assert named(search(port, mistake("a"), found)) == ["of experts"]
        tried = [turn for turn in port.tried if turn[1]]
        assert (tried[0], tried[-1]) == ((PROVING, ["a"]), (200, ["of experts"]))

    def test_finalist_of_an_earlier_turn_is_named_beside_a_proof(self) -> None:
        expected = mistake("expected").with_parameters({})
        figures = {"expected": {**CAUSE, "leaves": 1.35}, "at": {**CAUSE, "misfit": 1.05}}
        port = Port(figures, num_tokens=200)
        outcome = search(port, mistake("at"), suspects=frozenset({Site.Q_PROJ}), expected=[expected])
        assert (named(outcome), (SCREEN, ["at"]) in port.tried) == (["expected", "at"], True)
        port = Port({**figures, "expected": {**CAUSE, "leaves": 1.35, "misfit": 1.1}}, num_tokens=200)
        outcome = search(port, mistake("at"), suspects=frozenset({Site.Q_PROJ}), expected=[expected])
        assert (named(outcome), (SCREEN, ["at"]) in port.tried) == (["at", "expected"], False)

    @pytest.mark.parametrize(("leaves", "is_tried"), [(9.9, False), (10.0, True)])
    def test_fewest_tokens_judge_large_errors_alone(self, leaves: float, is_tried: bool) -> None:
        port = Port({}, null_figures={"leaves": leaves}, num_tokens=200)
        search(port, mistake("a"))
        assert (port.tried[1][0] == PROVING) is is_tried

    @pytest.mark.parametrize(("num_settled", "is_tried"), [(11, False), (12, True)])
    def test_fewest_tokens_are_settled(self, num_settled: int, is_tried: bool) -> None:
        port = Port({"a": CAUSE}, num_tokens=200, num_settled=num_settled)
        assert named(search(port, mistake("a"))) == ["a"]
        assert (port.tried[1][0] == PROVING) is is_tried
        fewest = [indices for indices in port.selected if len(indices) == PROVING]
        assert all(max(indices) < num_settled for indices in fewest)
        assert bool(fewest) is is_tried

    def test_proof_of_one_turn_spares_the_next(self) -> None:
        port = Port({"at": CAUSE}, num_tokens=200)
        suspects = frozenset({Site.K_PROJ})
        search(port, mistake("other"), mistake("at", Site.K_PROJ), suspects=suspects)
        assert [count for count, names in port.tried if names] == [PROVING, 200]


class TestFitting:
    @staticmethod
    def fitted(name: str) -> Mistake:
        return mistake(name, fitted="factor", candidates=lambda _: ({"factor": 2.0},))

    def rounds(self, port: Port, *mistakes: Mistake) -> list[list[str]]:
        """Names tried in each round of the fit."""
        search(port, *mistakes)
        return [names for _, names in port.tried if names and len(names) > len(set(names))]

    def test_proved_mistakes_are_not_fitted(self) -> None:
        assert self.rounds(Port({"a": {**CAUSE, "leaves": 1.3}}), self.fitted("a")) == []
        assert len(self.rounds(Port({"a": {**CAUSE, "leaves": 1.4}}), self.fitted("a"))) == 4

    def test_best_six_and_the_most_alike_are_fitted(self) -> None:
        figures = {f"m{index}": {"misfit": 401.0 + index, "likeness": 0.1} for index in range(12)}
        for index, likeness in ((11, 0.9), (10, 0.8), (9, 0.7), (8, 0.6), (7, 0.4)):
            figures[f"m{index}"]["likeness"] = likeness
        port = Port(figures)
        first, *_ = self.rounds(port, *(self.fitted(f"m{index}") for index in range(12)))
        assert list(dict.fromkeys(first)) == [*(f"m{index}" for index in range(6)), "m11", "m10", "m9", "m8"]


class TestFaint:
    FAINT: Mapping[str, float] = {**CAUSE, "unexplained": 1.4, "misfit": 0.9}

    def port(self, leaves: float, **options: Any) -> Port:
        figures = {"a": {"z": 1.0}, "b": {"z": -1.0}, "c": {"z": 0.9}}
        return Port(figures, null_figures={"leaves": leaves}, faint={"a": self.FAINT}, **options)

    def test_mistakes_that_the_noise_covers_are_tried_last(self) -> None:
        port = self.port(6.0)
        assert named(search(port, mistake("a"), mistake("b"), mistake("c"))) == ["a"]
        assert port.tried_faint == [(20, ["a", "b"])]

    def test_none_is_tried_if_the_error_is_far_above_the_noise(self) -> None:
        port = self.port(6.1)
        assert named(search(port, mistake("a"))) == []
        assert port.tried_faint == []

    def test_best_ten_by_z_and_the_most_alike_are_judged_on_all_tokens(self) -> None:
        figures = {f"m{index}": {"z": float(index), "likeness": 0.1} for index in range(20)}
        for index in range(4):
            figures[f"m{index}"]["likeness"] = 0.9 - index / 5
        may_be_faint = {f"m{index}": {"z": 1.0} for index in range(20)}
        port = Port(may_be_faint, null_figures={"leaves": 6.0}, faint=figures, num_tokens=200)
        search(port, *many(20))
        (screened, all_names), (whole, chosen) = port.tried_faint
        assert (screened, whole, len(all_names)) == (SCREEN, 200, 20)
        assert chosen == [*(f"m{index}" for index in range(19, 9, -1)), "m0", "m1", "m2"]


class TestPairs:
    PAIR: Mapping[str, Any] = {**CAUSE, "misfits": torch.ones(6)}
    # One of two mistakes takes some of the error away, and leaves more than both do.
    HALF: Mapping[str, Any] = {"likeness": 0.3, "misfits": torch.full((6,), 400.0)}

    @staticmethod
    def pairs(port: Port) -> list[str]:
        return [name for names in (names for _, names in port.tried) for name in names if "+" in name]

    def test_mistakes_of_attention_go_with_those_of_the_experts(self) -> None:
        port = Port({"a + e": self.PAIR, "a": self.HALF, "e": self.HALF})
        outcome = search(port, mistake("a"), mistake("e", Site.MOE_DELTA))
        assert (named(outcome), outcome.num_tried, outcome.nearest) == (["a + e"], 3, ())
        assert set(self.pairs(port)) == {"a + e"}

    @pytest.mark.parametrize(
        "half", [{"misfit": 1.9}, {"misfits": torch.tensor([0.0, 400.0, 0.0, 0.0, 0.0, 0.0])}]
    )
    def test_pair_is_not_named_if_one_mistake_alone_may_be_the_cause(self, half: dict[str, Any]) -> None:
        port = Port({"a + e": self.PAIR, "a": {**self.HALF, **half}, "e": self.HALF})
        assert named(search(port, mistake("a"), mistake("e", Site.MOE_DELTA))) == []
        assert set(self.pairs(port)) == {"a + e"}

    @pytest.mark.parametrize(("leaves", "is_tried"), [(1.49, False), (1.5, True)])
    def test_pairs_are_tried_if_the_error_is_clear(self, leaves: float, is_tried: bool) -> None:
        port = Port({"a": self.HALF}, null_figures={"leaves": leaves})
        search(port, mistake("a"), mistake("e", Site.MOE_DELTA))
        assert bool(self.pairs(port)) is is_tried

    def test_pairs_are_not_tried_if_one_mistake_explains_the_layer(self) -> None:
        port = Port({"a": CAUSE})
        search(port, mistake("a"), mistake("e", Site.MOE_DELTA))
        assert self.pairs(port) == []

    def test_one_side_alone_pairs_where_its_mistakes_begin_at_different_sites(self) -> None:
        figures = {"a": self.HALF, "b": self.HALF}
        port = Port(figures)
        search(port, mistake("a"), mistake("b"), mistake("c", Site.K_PROJ))
        assert set(self.pairs(port)) == {"a + c", "b + c"}
        reading = mistake("c", Site.K_PROJ, reads_right_layer=True)
        port = Port(figures)
        search(port, mistake("a"), reading)
        assert self.pairs(port) == []

    def test_what_leads_somewhere_goes_with_what_the_rest_of_the_error_is_like(self) -> None:
        figures = {"a": {**self.HALF, "predicted": torch.tensor([1.0, 0.0])}}
        figures |= {f"m{index}": {"predicted": torch.tensor([1.0, 0.0])} for index in range(20)}
        figures["rest"] = {"predicted": torch.tensor([0.0, 1.0])}
        port = Port(figures, error=torch.tensor([1.0, 1.0]))
        others = [mistake(name, Site.MOE_DELTA) for name in figures if name != "a"]
        search(port, mistake("a"), *others)
        # Twelve by the direction of the rest, and twelve by its tokens, of which nothing is known here.
        assert set(self.pairs(port)) == {"a + rest", *(f"a + m{index}" for index in range(12))}

    def test_what_leads_nowhere_is_not_paired(self) -> None:
        port = Port({"a": {"likeness": 0.19}, "e": {"explains": 0.19}})
        search(port, mistake("a"), mistake("e", Site.MOE_DELTA))
        assert self.pairs(port) == []

    def test_pairs_of_other_layers_are_not_paired_again(self) -> None:
        first, second = mistake("a"), mistake("e", Site.MOE_DELTA)
        pair = first.with_parameters({}).and_also(second.with_parameters({}))
        port = Port({"a + e": {"leaves": 9.0, "misfit": 90.0, "likeness": 0.5}, "a": self.HALF})
        search(port, first, second, expected=[pair])
        assert set(self.pairs(port)) == {"a + e"}

    def test_scores_of_decoded_tokens_are_not_paired(self) -> None:
        # Only as a mistake of decoded tokens, a1 leads somewhere.
        figures = {"decoded a1": {**self.HALF, "misfit": 1.0}, "a0": self.HALF}
        port = Port(figures, has_decoded=True)
        search(port, mistake("a0"), mistake("a1"), mistake("e", Site.MOE_DELTA))
        assert set(self.pairs(port)) == {"a0 + e"}


def test_three_nearest_are_told_if_nothing_explains_the_layer() -> None:
    port = Port(
        {f"m{index}": {"explains": index / 10, "misfit": 401.0 + math.cos(index)} for index in range(5)}
    )
    assert nearest(search(port, *many(5))) == ["m4", "m3", "m2"]
    assert nearest(search(Port({"m0": CAUSE}), *many(5))) == []
