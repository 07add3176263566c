"""The search's turns: which hypotheses are tried, on which tokens, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.catalogue.candidates import values_of
from compare.catalogue.mistake import Hypothesis, Mistake
from compare.diagnosis.score import Score
from compare.diagnosis.search import SearchOutcome, search_layer
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import replace_stage

# Far from an explanation, but no worse than no mistake.
USUAL = {"leaves": 20.0, "unexplained": 20.0, "misfit": 400.0, "explains": 0.0} | {
    "amplitude": 1.0,
    "z": 0.0,
    "likeness": 0.1,
}
CAUSE = {"leaves": 1.0, "misfit": 1.0, "explains": 0.99, "z": 50.0, "likeness": 0.99}
WORSE = {"misfit": 401.0}
# An explanation that leaves too much to be proved.
UNPROVED = {**CAUSE, "leaves": 1.4, "misfit": 1.9}
# The fewest tokens, which may prove a mistake.
PROVING = 12


def mistake(name: str, site: Site = Site.Q_PROJ, **options: Any) -> Mistake:
    return Mistake(name=name, build=lambda **_: replace_stage(site, lambda _: torch.zeros(1)), **options)


@dataclass
class Port:
    """A trial that gives each hypothesis the figures of its name, and notes what was tried on how many tokens.

    Figures of a name with a parameter, such as `edges 16`, are those of this parameter alone.

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
        spec = SimpleNamespace(graph=ModelGraph())
        return SimpleNamespace(
            spec=spec,
            graph=spec.graph.layer(0),
            tokens=torch.arange(self.num_tokens),
            attention_mask=mask,
            inputs=SimpleNamespace(is_judged=mask, spec=spec, graph=spec.graph.layer(0)),
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
        return SimpleNamespace(base=self.base)

    def refutes(self, hypothesis: Hypothesis) -> bool:
        return hypothesis.name in self.refuted

    def score(self, hypothesis: Any, figures: Mapping[str, Any], *, is_decode_only: bool = False) -> Score:
        return Score(hypothesis=hypothesis, is_decode_only=is_decode_only, **{**USUAL, **figures})

    def judge(self, hypotheses: Sequence[Hypothesis], *, keeps_predicted: bool = False) -> list[Score]:
        self.tried.append((self.num_tokens, [hypothesis.name for hypothesis in hypotheses]))
        figures = {**self.figures, **(self.on_proving if self.num_tokens == PROVING else {})}
        scores = []
        for hypothesis in hypotheses:
            name = " ".join((hypothesis.name, *map(str, hypothesis.parameters[0].values())))
            scores.append(self.score(hypothesis, figures.get(name, figures.get(hypothesis.name, {}))))
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


def word_search(port: Port, *mistakes: Mistake, **options: Any) -> str:
    """Return the names, or the nearest, and the turns: on how many tokens which hypotheses were tried."""
    outcome = search(port, *mistakes, **options)
    lines = [f"{outcome.num_tried} tried"]
    for title, scores in (("named", outcome.named), ("nearest", outcome.nearest)):
        words = [
            score.hypothesis.name + (" where decoded" if score.is_decode_only else "") for score in scores
        ]
        lines += [f"{title}: {', '.join(words)}"] if words else []
    for title, turns in (("", port.tried), ("faint, ", port.tried_faint)):
        lines += [f"  {title}{count} tokens: {', '.join(names)}" for count, names in turns if names]
    return "\n".join(lines)


AT_KEYS, AT_QUERIES = frozenset({Site.K_PROJ}), frozenset({Site.Q_PROJ})


def many(number: int, **options: Any) -> list[Mistake]:
    return [mistake(f"m{index}", **options) for index in range(number)]


def each(number: int, **figures: Callable[[int], Any]) -> dict[str, dict[str, Any]]:
    """Figures of m0, m1 and so on, each by the number of the mistake."""
    return {f"m{index}": {name: value(index) for name, value in figures.items()} for index in range(number)}


def fitted(name: str) -> Mistake:
    return mistake(name, fitted="factor", candidates=lambda _: ({"factor": 2.0},))


def found(name: str, site: Site, **options: Any) -> Mistake:
    """A mistake of which nothing is listed."""
    return mistake(name, site, candidates=lambda _: (), **options)


def find(clues: Any) -> tuple[Mapping[str, int], ...]:
    assert clues.base.spec.graph == ModelGraph()
    return ({},)


A, B, KEYS, EXPERTS = mistake("a"), mistake("b"), mistake("at", Site.K_PROJ), mistake("e", Site.MOE_DELTA)


def left(leaves: float) -> dict[str, Any]:
    """Figures of an explanation that leaves so much."""
    return {**CAUSE, "leaves": leaves}


def turns() -> dict[str, str]:
    """Return the mistakes that are tried, in their order."""
    one, other = mistake("one"), mistake("other")
    expected = [one.with_parameters({})]
    seen = (KEYS, other, mistake("late", Site.K_PROJ, find_at_last=lambda _: ({},)))
    faint = {"leaves": 6.0, "unexplained": 6.0}
    of_values = found("of attention", Site.Q_PROJ, find=find), found("of experts", Site.MOE_DELTA, find=find)
    return {
        "no token is usable": word_search(Port({"a": CAUSE}, num_usable=0), A),
        "one usable token is enough": word_search(Port({"a": CAUSE}, num_usable=1), A),
        "mistakes at blamed sites come first": word_search(
            Port({"at": left(1.4)}), other, KEYS, suspects=AT_KEYS
        ),
        # What the blamed site rules out is tried only where the error is so small that another site may hide it.
        **{
            f"another site may hide ρ {rho}": word_search(
                Port({"other": left(1.4)}, null_figures={"unexplained": rho}), other, KEYS, suspects=AT_KEYS
            )
            for rho in (6.0, 6.1)
        },
        **{
            f"an expected mistake comes before all, and leaves {leaves}": word_search(
                Port({"one": left(leaves)}), other, one, expected=expected
            )
            for leaves in (1.3, 1.4)
        },
        "an expected mistake needs no proof if nothing else is tried": word_search(
            Port({"one": left(1.4)}), one, expected=expected
        ),
        **{
            f"wrong weights that were seen are {cause}": word_search(
                Port({cause: CAUSE}, null_figures=faint), *seen, suspects=AT_KEYS, is_seen=True
            )
            for cause in ("at", "other", "at + other")
        },
        "a refuted hypothesis is not tried": word_search(Port({"a": CAUSE}, refuted=frozenset({"a"})), A, B),
        # Few tokens need not hold those of two experts.
        "hypotheses that the values give": word_search(
            Port({"of experts": UNPROVED}, num_tokens=200), *of_values
        ),
        "three are nearest": word_search(
            Port(each(5, explains=lambda n: n / 10, misfit=lambda n: 401.0 + math.cos(n))), *many(5)
        ),
    }


def tokens() -> dict[str, str]:
    """On how many tokens hypotheses are tried, and which of them go on."""
    of_z = each(30, misfit=lambda n: 401.0 + n, z=lambda n: (-1) ** n * n if 20 <= n < 26 else 0.0)
    of_likeness = {
        **each(30, misfit=lambda _: 401.0),
        **{f"f{index}": {"misfit": 500.0, "likeness": 0.3 + index / 10} for index in range(5)},
    }
    decoded = {"a": WORSE, "decoded a": CAUSE, "b": {"misfit": 900.0}, "decoded b": {"misfit": 900.0}}
    return {
        **{
            f"few of {number} tokens screen": word_search(
                Port({"a": UNPROVED}, num_tokens=number, null_figures={"leaves": 9.9}), A
            )
            for number in (36, 37, 96, 97)
        },
        "thirty go on, and ten of them": word_search(
            Port(each(50, misfit=lambda n: 401.0 + n, z=lambda _: 0.0), num_tokens=200), *many(50)
        ),
        "all that are better than no mistake go on": word_search(
            Port({**each(40, misfit=lambda _: 399.0), "m40": WORSE}, num_tokens=200), *many(41)
        ),
        "those with a fitted parameter go on by likeness": word_search(
            Port(of_likeness, num_tokens=200), *many(30), *(fitted(f"f{index}") for index in range(5))
        ),
        "five go on by z of either sign": word_search(Port(of_z, num_tokens=200), *many(30)),
        "decoded tokens alone come near": word_search(Port(decoded, num_tokens=200, has_decoded=True), A, B),
    }


def proofs() -> dict[str, str]:
    """A mistake that the fewest tokens prove is judged on all, and ends the search."""
    near = {"m0": CAUSE, "m1": {**CAUSE, "misfit": 1.01}}
    beside = {
        **each(8, likeness=lambda n: n / 10),
        "m0": {**CAUSE, "misfit": 1.5, "likeness": 0.2},
        "m1": {**CAUSE, "likeness": 0.3},
        "m2": {**CAUSE, "misfit": 1.51, "likeness": 0.2},
    }
    unlike = {"m0": {**CAUSE, "likeness": 0.5}, "m1": {"likeness": 0.7}}
    of_a = {"a": CAUSE, "b": {}}
    of_experts = found("of experts", Site.MOE_DELTA, find=find)
    at_last = found("of experts", Site.MOE_DELTA, find_at_last=find)
    expected = [mistake("expected").with_parameters({})]
    at = mistake("at")
    return {
        "the fewest tokens prove": word_search(Port({"m5": CAUSE}, num_tokens=200), *many(9)),
        "near ones and the most alike are judged beside it": word_search(
            Port(near, on_proving=beside, num_tokens=200), *many(9)
        ),
        "one that is less like the error than another": word_search(Port(unlike, num_tokens=200), *many(5)),
        "all tokens prove another": word_search(Port({"b": CAUSE}, on_proving=of_a, num_tokens=200), A, B),
        "all tokens do not prove it": word_search(
            Port({"a": UNPROVED, "b": CAUSE}, on_proving=of_a, num_tokens=200), A, *many(5), B
        ),
        **{
            f"too few tokens judge {number}": word_search(
                Port(
                    {"a": CAUSE, "m9": CAUSE},
                    on_proving=each(number, misfit=lambda _: math.inf, likeness=lambda _: 0.0),
                    num_tokens=200,
                ),
                *many(20),
                A,
            )
            for number in (10, 11)
        },
        "decoded tokens alone are proved": word_search(
            Port({"decoded a": CAUSE}, num_tokens=200, has_decoded=True), A, B
        ),
        **{
            f"hypotheses that the values give, {title}": word_search(
                Port({"of experts": figures}, num_tokens=200), A, of_experts
            )
            for title, figures in (("proved", CAUSE), ("not proved", UNPROVED))
        },
        "a longer search of the values comes last": word_search(
            Port({"of experts": UNPROVED}, num_tokens=200), A, at_last
        ),
        **{
            f"a finalist of an earlier turn, of misfit {misfit}, is named beside a proof": word_search(
                Port(
                    {"expected": {**left(1.35), "misfit": misfit}, "at": {**CAUSE, "misfit": 1.05}},
                    num_tokens=200,
                ),
                at,
                suspects=AT_QUERIES,
                expected=expected,
            )
            for misfit in (1.0, 1.1)
        },
        **{
            f"fewest tokens judge ρ {rho}": word_search(
                Port({}, null_figures={"leaves": rho}, num_tokens=200), A
            )
            for rho in (9.9, 10.0)
        },
        "one turn spares the next": word_search(
            Port({"at": CAUSE}, num_tokens=200), mistake("other"), KEYS, suspects=AT_KEYS
        ),
    }


def fits() -> dict[str, str]:
    """Return the mistakes whose parameter is fitted, and those that are tried below the noise."""
    alike = dict(zip(range(11, 6, -1), (0.9, 0.8, 0.7, 0.6, 0.4), strict=True))
    figures = each(12, misfit=lambda n: 401.0 + n, likeness=lambda n: alike.get(n, 0.1))
    in_noise = {"a": {"z": 1.0}, "b": {"z": -1.0}, "c": {"z": 0.9}}
    faint = {"a": {**CAUSE, "unexplained": 1.4, "misfit": 0.9}}
    by_z = each(20, z=float, likeness=lambda n: 0.9 - n / 5 if n < 4 else 0.1)
    return {
        **{
            f"fits what leaves {leaves}": word_search(Port({"a": left(leaves)}), fitted("a"))
            for leaves in (1.3, 1.4)
        },
        "fits the best six and the most alike": word_search(
            Port(figures), *(fitted(f"m{index}") for index in range(12))
        ),
        **{
            f"the noise covers mistakes at ρ {rho}": word_search(
                Port(in_noise, null_figures={"leaves": rho}, faint=faint), A, B, mistake("c")
            )
            for rho in (6.0, 6.1)
        },
        "faint ones, the best ten by z and the most alike on all tokens": word_search(
            Port(each(20, z=lambda _: 1.0), null_figures={"leaves": 6.0}, faint=by_z, num_tokens=200),
            *many(20),
        ),
    }


def pairs() -> dict[str, str]:
    """Two mistakes at once."""
    both: Mapping[str, Any] = {**CAUSE, "misfits": torch.ones(6)}
    # One of two mistakes takes some of the error away, and leaves more than both do.
    half: Mapping[str, Any] = {"likeness": 0.3, "misfits": torch.full((6,), 400.0)}
    one_token = torch.tensor([0.0, 400.0, 0.0, 0.0, 0.0, 0.0])
    halves = {"a": half, "b": half}
    along = {"a": {**half, "predicted": torch.tensor([1.0, 0.0])}}
    along |= each(20, predicted=lambda _: torch.tensor([1.0, 0.0]))
    along["rest"] = {"predicted": torch.tensor([0.0, 1.0])}
    of_experts = [mistake(name, Site.MOE_DELTA) for name in along if name != "a"]
    tried = [A.with_parameters({}).and_also(EXPERTS.with_parameters({}))]
    vain = {"a + e": {"leaves": 9.0, "misfit": 90.0, "likeness": 0.5}, "a": half}
    decoded = {"decoded a1": {**half, "misfit": 1.0}, "a0": half}
    return {
        "of attention and of the experts": word_search(
            Port({"a + e": both, "a": half, "e": half}), A, EXPERTS
        ),
        **{
            f"one mistake alone may be the cause, by its {title}": word_search(
                Port({"a + e": both, "a": {**half, **alone}, "e": half}), A, EXPERTS
            )
            for title, alone in (("misfit", {"misfit": 1.9}), ("tokens", {"misfits": one_token}))
        },
        **{
            f"the error is of ρ {rho}": word_search(
                Port({"a": half}, null_figures={"leaves": rho}), A, EXPERTS
            )
            for rho in (1.49, 1.5)
        },
        "one mistake explains the layer": word_search(Port({"a": CAUSE}), A, EXPERTS),
        "one side alone, at different sites": word_search(Port(halves), A, B, mistake("c", Site.K_PROJ)),
        "a mistake that reads the right layer": word_search(
            Port(halves), A, mistake("c", Site.K_PROJ, reads_right_layer=True)
        ),
        # Twelve by the direction of the rest, and twelve by its tokens, of which nothing is known here.
        "what leads somewhere, and what the rest of the error is like": word_search(
            Port(along, error=torch.tensor([1.0, 1.0])), A, *of_experts
        ),
        "what leads nowhere": word_search(
            Port({"a": {"likeness": 0.19}, "e": {"explains": 0.19}}), A, EXPERTS
        ),
        "pairs of other layers are not paired again": word_search(Port(vain), A, EXPERTS, expected=tried),
        # Only as a mistake of decoded tokens, a1 leads somewhere.
        "scores of decoded tokens are not paired": word_search(
            Port(decoded, has_decoded=True), mistake("a0"), mistake("a1"), EXPERTS
        ),
    }


def test_searches_read_as_their_golden_text(expect_text: Callable[..., None]) -> None:
    expect_text("search.txt", {**turns(), **tokens(), **proofs(), **fits(), **pairs()})


@pytest.mark.parametrize(("num_settled", "is_tried"), [(11, False), (12, True)])
def test_fewest_tokens_are_settled(num_settled: int, is_tried: bool) -> None:
    port = Port({"a": CAUSE}, num_tokens=200, num_settled=num_settled)
    assert [score.hypothesis.name for score in search(port, A).named] == ["a"]
    fewest = [indices for indices in port.selected if len(indices) == PROVING]
    assert all(max(indices) < num_settled for indices in fewest)
    assert bool(fewest) is is_tried


@pytest.mark.parametrize(
    "on_first",
    [{"leaves": 2.0, "misfit": 4.0}, {"leaves": math.inf, "misfit": math.inf}],
    ids=["tied", "unsettled"],
)
def test_parameters_of_which_the_first_tokens_say_nothing_are_judged_on_more(
    on_first: Mapping[str, float],
) -> None:
    tied = {"leaves": 2.0, "misfit": 4.0, "likeness": 0.9}
    port = Port(
        {"edges 16": CAUSE},
        on_proving={"edges 8": tied, "edges 16": {**tied, **on_first}, "edges 32": {**tied, "misfit": 5.0}},
        num_tokens=40,
        num_usable=40,
        num_settled=40,
    )
    outcome = search(port, mistake("edges", candidates=values_of("size", 8, 16, 32)))
    assert [dict(score.hypothesis.parameters[0]) for score in outcome.named] == [{"size": 16}]
    assert [len(names) for _, names in port.tried if names][:2] == [3, 2]


def test_first_tokens_hold_the_wrong_ones_where_these_are_few() -> None:
    misfits = torch.zeros(60)
    misfits[[5, 31, 59]] = 400.0
    port = Port({}, null_figures={"misfits": misfits}, num_tokens=60, num_usable=60, num_settled=60)
    search(port, mistake("edges"))
    first = port.selected[0]
    assert len(first) == PROVING
    assert {5, 31, 59} <= set(first)
