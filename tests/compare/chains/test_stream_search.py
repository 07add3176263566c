"""The search for a model's last wrong part, on runs that are known."""

from __future__ import annotations

import math

import pytest

from compare.chains.stream_search import search_stream
from minimax_tools.results.probes import Point, ReplacedRun, StreamSearch
from minimax_tools.results.results import Verdict

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
    found = search({None, 3, 40, 41})
    assert found.suspects == (41,)


def test_right_model_passes_with_few_runs() -> None:
    found = search(set())
    assert (found.verdict, found.finding) == (Verdict.PASS, None)
    assert len(found.runs) <= MOST_RUNS
    assert found.runs[-1].point is None


def test_no_run_is_asked_for_twice() -> None:
    points = [run.point for run in search({17}).runs]
    assert len(points) == len(set(points))


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
    assert {run.point for run in found.runs} == made


@pytest.mark.parametrize("is_exhaustive", [False, True])
def test_error_just_below_the_limit_behind_the_finding_makes_another_suspect(is_exhaustive: bool) -> None:
    """A mistake in layer 20 that noise lifts over the limit only in the run from layer 18 on."""
    excesses = {19: 0.99, 20: 0.9}

    def judge_run(point: Point) -> ReplacedRun:
        is_right = depth(point) > 18
        excess = 1.03 if not is_right else excesses.get(depth(point), 0.2)
        return ReplacedRun(point=point, is_right=is_right, excess=excess)

    found = search_stream(NUM_LAYERS, judge_run, reference="golden", target="", is_exhaustive=is_exhaustive)
    assert found.finding is not None
    assert (found.finding.point, found.suspects) == (18, (18, 19, 20))


def test_large_error_behind_a_small_one_makes_no_suspect() -> None:
    def judge_run(point: Point) -> ReplacedRun:
        is_right = depth(point) > 18
        return ReplacedRun(point=point, is_right=is_right, excess=0.9 if is_right else 9.0)

    found = search_stream(NUM_LAYERS, judge_run, reference="golden", target="")
    assert found.suspects == (18,)


def test_all_parts_behind_may_be_suspect() -> None:
    def judge_run(point: Point) -> ReplacedRun:
        is_right = depth(point) > NUM_LAYERS - 2
        return ReplacedRun(point=point, is_right=is_right, excess=0.9 if is_right else 1.1)

    found = search_stream(NUM_LAYERS, judge_run, reference="golden", target="")
    assert found.suspects == (NUM_LAYERS - 2, NUM_LAYERS - 1, NUM_LAYERS)
