from __future__ import annotations

import threading

from minimax_tools.ranks.rank_group import BackgroundCall


def test_call_gives_what_its_call_gave() -> None:
    call = BackgroundCall(lambda: 7)
    assert call.is_over(10)
    assert (call.result, call.error) == (7, None)


def test_error_of_the_call_is_kept() -> None:
    call = BackgroundCall(lambda: 1 // 0)
    assert call.is_over(10)
    assert isinstance(call.error, ZeroDivisionError)


def test_call_that_does_not_end_is_left_behind() -> None:
    release = threading.Event()
    call = BackgroundCall(release.wait)
    assert not call.is_over(0.01)
    release.set()
    assert call.is_over(10)
