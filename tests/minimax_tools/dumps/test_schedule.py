"""Passes of a dump: their tokens and requests, joined along the prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from minimax_tools.dumps.schedule import PassRecord, Schedule
from minimax_tools.errors import CaptureError, IncomparableError

HERE = Path("dump")


def record(step: str, requests: str, positions: list[int], **more: object) -> PassRecord:
    return PassRecord(step=step, requests=tuple(requests), positions=tuple(positions), **more)  # type: ignore[arg-type]


def places(schedule: Schedule, request: str) -> list[tuple[str, int, int, int]]:
    return [(one.step, one.row, one.start, one.length) for one in schedule.stretches[request]]


def test_chunks_are_joined_whatever_the_passes_order() -> None:
    schedule = Schedule.of([record("later", "a", [4, 5, 0, 0]), record("first", "a", [0, 1, 2, 3])])
    assert places(schedule, "a") == [("first", 0, 0, 4), ("later", 0, 4, 2)]
    assert schedule.length("a") == 6


def test_requests_of_one_pass_lie_one_after_another_and_padding_is_nobodys() -> None:
    schedule = Schedule.of([record("0", "ab", [0, 1, 2, 0, 1, 0, 0, 0])])
    assert (places(schedule, "a"), places(schedule, "b")) == ([("0", 0, 0, 3)], [("0", 3, 0, 2)])


def test_decoded_rows_whose_positions_follow_by_chance_are_of_their_requests() -> None:
    prefill = record("0", "ab", [0, 1, 2, 0, 1, 2, 3])
    schedule = Schedule.of([prefill, record("1", "ab", [3, 4, 0, 0], is_decode=True)])
    assert (places(schedule, "a")[1], places(schedule, "b")[1]) == (("1", 0, 3, 1), ("1", 1, 4, 1))


def test_of_passes_that_compute_the_whole_prompt_anew_the_longest_counts() -> None:
    """transformers without a cache, as vLLM Neuron's reference run: its decode passes hold all tokens so far."""
    passes = [record("prefill", "a", [0, 1, 2]), record("decode", "a", [0, 1, 2, 3], is_decode=True)]
    schedule = Schedule.of([*passes, record("other", "b", [0, 1, 2])])
    assert places(schedule, "a") == [("decode", 0, 0, 4)]
    assert schedule.repeated == {"prefill"}
    assert places(schedule, "b") == [("other", 0, 0, 3)]


def test_run_that_was_dumped_twice_is_no_run_without_a_cache() -> None:
    with pytest.raises(CaptureError, match="token 0 of request a was computed in two passes"):
        Schedule.of([record("0", "a", [0, 1, 2]), record("1", "a", [0, 1, 2])])


def test_known_ends_tell_requests_whose_positions_follow() -> None:
    passes = [record("0", "b", [0, 1, 2], ends=(3,)), record("1", "ab", [0, 1, 2, 3, 4], ends=(3, 5))]
    schedule = Schedule.of(passes)
    assert (places(schedule, "a"), places(schedule, "b")[1]) == ([("1", 0, 0, 3)], ("1", 3, 3, 2))


def test_without_ends_such_requests_are_refused_rather_than_mixed_up() -> None:
    with pytest.raises(CaptureError, match="does not tell which rows are of request b"):
        Schedule.of([record("0", "b", [0, 1, 2]), record("1", "ab", [0, 1, 2, 3, 4])])
    # Nor is padding taken for the second one.
    with pytest.raises(CaptureError, match="token 0 of request b was computed in two passes"):
        Schedule.of([record("0", "b", [0, 1, 2]), record("1", "ab", [0, 1, 2, 3, 4, 0])])


def test_gaps_name_what_is_missing() -> None:
    with pytest.raises(CaptureError, match="tokens 2 to 3 of request a were computed in no pass"):
        Schedule.of([record("0", "a", [0, 1]), record("1", "a", [4, 5])])


class TestChoice:
    SCHEDULE = Schedule.of([record("0", "ab", [0, 1, 2, 0, 1])])

    @pytest.mark.parametrize(
        ("lengths", "named", "chosen"),
        [
            ((2, 3), (), ("b", "a")),  # requests of these lengths
            ((2, 2), ("b", "a"), ("b", "a")),  # the map has the last word
            ((3,), (), ("a",)),  # the only one of this length
        ],
    )
    def test_requests_of_the_prompts_are_chosen(
        self, lengths: tuple[int, ...], named: tuple[str, ...], chosen: tuple[str, ...]
    ) -> None:
        assert self.SCHEDULE.choose(lengths, named=named, directory=HERE) == chosen

    def test_else_requests_count_in_their_natural_order(self) -> None:
        schedule = Schedule.of([PassRecord(step="0", requests=("r10", "r9"), positions=(0, 1, 0, 1))])
        for lengths in ((2, 2), (2, 1)):
            assert schedule.choose(lengths, named=(), directory=HERE) == ("r9", "r10")

    def test_requests_that_cannot_be_told_are_refused_with_their_names(self) -> None:
        with pytest.raises(CaptureError, match="found a of 3, b of 2.* as requests in a map"):
            self.SCHEDULE.choose((4,), named=(), directory=HERE)
        three = Schedule.of([record("0", "abc", [0, 1, 2, 0, 1, 0, 1, 2])])
        with pytest.raises(CaptureError, match="which requests are the prompts cannot be told"):
            three.choose((3,), named=(), directory=HERE)
        with pytest.raises(IncomparableError, match="fewer tokens of request b than its prompt has"):
            self.SCHEDULE.choose((3, 3), named=(), directory=HERE)

    def test_request_with_a_gap_is_an_error_only_if_it_is_meant(self) -> None:
        schedule = Schedule.of([record("0", "a", [0, 1, 2, 0]), record("1", "b", [4, 5])])
        assert schedule.choose((3,), named=(), directory=HERE) == ("a",)
        for lengths, named in (((6,), ("b",)), ((3, 6), ())):
            with pytest.raises(CaptureError, match="tokens 0 to 3 of request b were computed in no pass"):
                schedule.choose(lengths, named=named, directory=HERE)
