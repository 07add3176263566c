"""The place of a rank, as torchrun's variables tell it."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.ranks.rank_place import RankPlace, warn_of_idle_cores

ALONE = RankPlace()


def test_ranks_on_two_machines_are_told_apart() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert RankPlace.from_environment(variables) == RankPlace(rank=3, num_ranks=4, local_rank=1, num_local=2)


def test_ranks_without_a_local_number_share_no_device() -> None:
    # As started by hand or by a scheduler that sets these two alone.
    places = [RankPlace.from_environment({"RANK": str(rank), "WORLD_SIZE": "4"}) for rank in range(4)]
    assert [place.local_rank for place in places] == [0, 1, 2, 3]
    on_two_machines = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert RankPlace.from_environment(on_two_machines).local_rank == 1


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_process_that_no_launcher_started_is_the_only_rank(variables: dict[str, str]) -> None:
    assert RankPlace.from_environment(variables) == ALONE


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is no whole number: found two"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 is no rank of 2: expected 0 to 1"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is 0: expected 1 or more"),
    ],
)
def test_variables_that_make_no_sense_are_refused(variables: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        RankPlace.from_environment(variables)


def test_idle_cores_are_told_of_by_rank_0_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one_of_two = RankPlace(rank=0, num_ranks=2, local_rank=0, num_local=1)
    with caplog.at_level(logging.WARNING, logger="minimax_tools.ranks.rank_place"):
        warn_of_idle_cores(replace(one_of_two, rank=1))
        warn_of_idle_cores(ALONE)
        assert not caplog.text
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        warn_of_idle_cores(one_of_two)
        assert not caplog.text
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        warn_of_idle_cores(one_of_two)
    assert "OMP_NUM_THREADS is 1" in caplog.text
