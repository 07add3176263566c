"""The search for wrong layers, by chains and by runs of which a part is replaced, on ports that are known."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from compare.chains.stream_search import (
    find_all,
    find_exhaustively,
    find_first,
    find_until_proof,
    search_stream,
)
from minimax_tools.json_codec import decode, encode
from minimax_tools.model.span import Span
from minimax_tools.results.probes import BisectionFinding, Chain, Point, Probe, ReplacedRun, StreamSearch
from minimax_tools.results.results import Verdict


class Port:
    """A port whose layers `wrong` are wrong alone, and whose chains that hold one of `drifting` whole are."""

    def __init__(
        self,
        *wrong: int,
        chain_length: int = 2,
        drifting: tuple[Span, ...] = (),
        drift: float = 9.0,
        blind: bool = False,
    ) -> None:
        self.wrong, self.chain_length, self.blind = wrong, chain_length, blind
        self.drifting, self.drift = drifting, drift
        self.probes: list[Probe] = []

    @property
    def covered(self) -> list[int]:
        """Layers of the chains that were judged."""
        return [layer for probe in self.probes for chain in probe.chains for layer in chain.span]

    def run(self, span: Span) -> Probe:
        chains: list[Chain] = []
        for start in range(span.start, span.stop, self.chain_length):
            chains.append(self._judge(Span(start, min(start + self.chain_length, span.stop))))
            if not chains[-1].is_right:
                break
        self.probes.append(Probe(span=span, chains=tuple(chains)))
        return self.probes[-1]

    def _judge(self, span: Span) -> Chain:
        is_wrong = any(layer in span for layer in self.wrong) and not (self.blind and len(span) > 1)
        is_drifting = any(part.start in span and part.last in span for part in self.drifting)
        excess = 9.0 if is_wrong else self.drift if is_drifting else 0.5
        return Chain(span=span, is_right=excess <= 1.0, excess=excess, visible=0.01)


def spans_of(findings: Iterable[BisectionFinding]) -> list[Span]:
    return [finding.chain.span for finding in findings]


@pytest.mark.parametrize("chain_length", [1, 2, 3, 8, 62])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 8, 61, 62, 64])
def test_first_wrong_layer_is_found_wherever_it_is_in_at_most_so_many_runs(
    num_layers: int, chain_length: int
) -> None:
    most = math.ceil(math.log2(num_layers)) + 1
    for layer in range(num_layers):
        port = Port(layer, chain_length=chain_length)
        finding = find_first(Span(0, num_layers), port.run)
        assert finding is not None
        assert finding.chain.span == Span.single(layer)
        assert finding.is_culprit
        assert len(port.probes) <= most
        # Both sides of the cut were run.
        right = {n for probe in port.probes for chain in probe.chains if chain.is_right for n in chain.span}
        assert set(range(layer)) <= right
        assert port.probes[-1].chains[-1] == finding.chain


def test_clean_range_is_covered_by_chains_that_were_judged() -> None:
    port = Port()
    assert find_first(Span(5, 67), port.run) is None
    assert len(port.probes) == 7
    assert port.covered == list(range(5, 67))


def test_random_culprits_are_all_found_in_order() -> None:
    chance = random.Random(0)
    for _ in range(400):
        num_layers = chance.randint(1, 70)
        wrong = sorted(chance.sample(range(num_layers), chance.randint(0, min(5, num_layers))))
        port = Port(*wrong, chain_length=chance.randint(1, 8))
        found = [Span.single(layer) for layer in wrong]
        assert spans_of(find_all(Span(0, num_layers), port.run)) == found
        first = find_first(Span(0, num_layers), port.run)
        assert ([] if first is None else [first.chain.span]) == found[:1]


def test_every_layer_runs_alone_when_asked_for() -> None:
    port = Port(3, 4, 11)
    assert spans_of(find_exhaustively(Span(2, 12), port.run)) == [Span.single(layer) for layer in (3, 4, 11)]
    assert [probe.span for probe in port.probes] == [Span.single(layer) for layer in range(2, 12)]
    # A mistake that chains cannot see is found so alone.
    blind = Port(5, blind=True)
    assert find_first(Span(0, 16), blind.run) is None
    assert spans_of(find_exhaustively(Span(0, 16), blind.run)) == [Span.single(5)]


def test_chain_that_is_wrong_of_layers_that_are_right_is_no_culprit() -> None:
    port = Port(chain_length=4, drifting=(Span(4, 6),))
    finding = find_first(Span(0, 8), port.run)
    assert finding is not None
    assert not finding.is_culprit
    assert {4, 5} <= set(finding.chain.span)
    assert any(len(probe.span) == 1 for probe in port.probes), "it was tried alone"
    # The search goes on behind a drift.
    port = Port(13, drifting=(Span(4, 6),))
    drift, culprit = find_all(Span(0, 16), port.run)
    assert (drift.is_culprit, culprit.is_culprit, culprit.chain.span) == (False, True, Span.single(13))


@pytest.mark.parametrize(
    ("wrong", "drifting", "drift", "found"),
    [
        # It goes on behind a faint drift.
        ((40, 50), (Span(2, 4),), 1.1, [Span(2, 4), Span.single(40)]),
        # Without a proof, it covers every layer.
        ((), (Span(2, 4), Span(30, 32)), 1.1, [Span(2, 4), Span(30, 32)]),
        # It ends at a culprit, and at a loud drift.
        ((2, 40), (Span(4, 6),), 2.1, [Span.single(2)]),
        ((40,), (Span(4, 6),), 2.1, [Span(4, 6)]),
    ],
)
def test_search_ends_at_a_proof(
    wrong: tuple[int, ...], drifting: tuple[Span, ...], drift: float, found: list[Span]
) -> None:
    port = Port(*wrong, drifting=drifting, drift=drift)
    findings = list(find_until_proof(Span(0, 62), port.run))
    assert spans_of(findings) == found
    assert findings[-1].is_proof or set(port.covered) == set(range(62))


RIGHT = Chain(span=Span(0, 2), is_right=True, excess=0.1 + 0.2, visible=0.01)
WRONG = Chain(span=Span(2, 4), is_right=False, excess=math.inf, visible=0.01, reason="3 NaN")


@pytest.mark.parametrize(
    ("chains", "fault"),
    [
        ((RIGHT,), "do not cover"),
        ((WRONG,), "do not follow"),
        ((RIGHT, WRONG, replace(RIGHT, span=Span(4, 6))), "went on behind"),
    ],
)
def test_probe_refuses_chains_that_do_not_add_up(chains: tuple[Chain, ...], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Probe(span=Span(0, 8), chains=chains)


def test_probe_comes_back_from_its_json() -> None:
    probe = Probe(span=Span(0, 8), chains=(RIGHT, WRONG))
    assert probe.first_wrong is WRONG
    assert decode(Probe, encode(probe)) == probe


NUM_LAYERS = 62
# One part before the layers and one behind them.
MOST_RUNS = math.ceil(math.log2(NUM_LAYERS + 2)) + 1


def depth(point: Point) -> int:
    return -1 if point is None else point


def search(wrong: set[Point], *, is_exhaustive: bool = False, made: set[Point] | None = None) -> StreamSearch:
    """Search a model whose parts `wrong` are wrong; only the runs `made` have been made, or all."""

    def judge_run(point: Point) -> ReplacedRun | None:
        if made is not None and point not in made:
            return None
        is_right = all(depth(part) < depth(point) for part in wrong)
        return ReplacedRun(point=point, is_right=is_right, excess=0.5 if is_right else 9.0)

    return search_stream(NUM_LAYERS, judge_run, reference="golden", target="", is_exhaustive=is_exhaustive)


@pytest.mark.parametrize("part", [None, 0, 1, 30, 31, 32, 60, 61, 62])
@pytest.mark.parametrize("is_exhaustive", [False, True])
def test_single_wrong_part_is_found(part: Point, is_exhaustive: bool) -> None:
    found = search({part}, is_exhaustive=is_exhaustive)
    assert found.is_finished
    assert found.verdict is Verdict.FAIL
    assert found.finding is not None
    assert found.finding.point == part
    assert found.suspects == (part,)
    assert found.num_judged == (NUM_LAYERS + 2 if part is None else NUM_LAYERS - part + 1)
    if is_exhaustive:
        assert len(found.runs) == found.num_judged
    else:
        assert len(found.runs) <= MOST_RUNS


def test_last_of_several_wrong_parts_is_found() -> None:
    assert search({None, 3, 40, 41}).suspects == (41,)


def test_right_model_passes_with_few_runs() -> None:
    found = search(set())
    assert (found.verdict, found.finding) == (Verdict.PASS, None)
    assert len(found.runs) <= MOST_RUNS
    assert found.runs[-1].point is None


def test_search_waits_for_one_run_after_the_other() -> None:
    made: set[Point] = set()
    for _ in range(MOST_RUNS):
        found = search({17}, made=made)
        if found.is_finished:
            break
        assert found.verdict is Verdict.INCOMPARABLE
        assert found.waits_for not in made
        made.add(found.waits_for)
    assert found.suspects == (17,)
    # None is asked for twice.
    points = [run.point for run in found.runs]
    assert (len(points), set(points)) == (len(made), made)


@pytest.mark.parametrize(
    ("last_wrong", "excess", "behind", "suspects"),
    [
        # A mistake in layer 20 that noise lifts over the limit only in the run from layer 18 on.
        (18, 1.03, {19: 0.99, 20: 0.9}, (18, 19, 20)),
        # A large error behind a small one.
        (18, 9.0, dict.fromkeys(range(19, 64), 0.9), (18,)),
        # All parts behind.
        (60, 1.1, dict.fromkeys(range(61, 64), 0.9), (60, 61, 62)),
    ],
)
@pytest.mark.parametrize("is_exhaustive", [False, True])
def test_error_just_below_the_limit_behind_the_finding_makes_another_suspect(
    last_wrong: int,
    excess: float,
    behind: dict[int, float],
    suspects: tuple[int, ...],
    is_exhaustive: bool,
) -> None:
    def judge_run(point: Point) -> ReplacedRun:
        is_right = depth(point) > last_wrong
        found = behind.get(depth(point), 0.2) if is_right else excess
        return ReplacedRun(point=point, is_right=is_right, excess=found)

    found = search_stream(NUM_LAYERS, judge_run, reference="golden", target="", is_exhaustive=is_exhaustive)
    assert found.suspects == suspects
