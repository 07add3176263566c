from __future__ import annotations

import threading

from gpu_reference.ranks.background_call import Errand


def test_errand_gives_what_its_call_gave() -> None:
    errand = Errand(lambda: 7)
    assert errand.is_over(10)
    assert (errand.result, errand.error) == (7, None)


def test_error_of_the_call_is_kept() -> None:
    errand = Errand(lambda: 1 // 0)
    assert errand.is_over(10)
    assert isinstance(errand.error, ZeroDivisionError)


def test_call_that_does_not_end_is_left_behind() -> None:
    release = threading.Event()
    errand = Errand(release.wait)
    assert not errand.is_over(0.01)
    release.set()
    assert errand.is_over(10)
