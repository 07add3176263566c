"""Loops over arrays that numba compiles at their first call.

A compiled loop runs without Python's lock, so threads run it in parallel. numba keeps the machine code for other
processes in `__pycache__` beside the source. If that folder is read-only, it uses the user's cache folder.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

# Other threads wait here instead of compiling the same loop again.
_LOCK = threading.Lock()


def compiled(
    signature: str, *, sums_in_any_order: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function of arrays and numbers, so that its first call compiles it.

    Args:
        signature: Types of its arguments in numba's notation, such as `(float64[::1], float64)`; it takes no others.
        sums_in_any_order: Whether sums and products may be regrouped, for vector instructions. NaN and Inf keep their
            meaning.
    """
    liberties = frozenset({"reassoc"} if sums_in_any_order else ())

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        made: list[Callable[P, R]] = []

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not made:
                with _LOCK:
                    if not made:
                        made.append(_compile(function, signature, liberties))
            return made[0](*args, **kwargs)

        return call

    return decorate


def _compile(function: Callable[P, R], signature: str, liberties: frozenset[str]) -> Callable[P, R]:
    # The import takes half a second, which commands that compare nothing save.
    import numba

    compile_kept, compile_anew = (
        numba.njit(signature, nogil=True, fastmath=set(liberties), error_model="numpy", cache=cache)
        for cache in (True, False)
    )
    try:
        return cast("Callable[P, R]", compile_kept(function))
    except Exception:
        # The cache cannot be used: numba has many errors for that. An error of the function itself comes again below.
        return cast("Callable[P, R]", compile_anew(function))
