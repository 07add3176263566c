"""compiled: a plain loop over arrays that numba makes machine code of, the first time it is called.

The loop runs without Python's lock, so that threads run it side by side. numba keeps the machine code for other
processes in `__pycache__` beside the source or, where that cannot be written, in the user's cache folder.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

# numba compiles for one thread at a time: others wait here instead of compiling it again.
_LOCK = threading.Lock()


def compiled(
    signature: str, *, sums_in_any_order: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function of arrays and numbers compiled at its first call.

    Args:
        signature: The types of its arguments in numba's words, such as `(float64[::1], float64)`; it takes no others.
        sums_in_any_order: Whether sums and products may be regrouped, and so be taken in several lanes at once. Nothing
            else may change: NaN and Inf are what they are.
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
    # Half a second, which commands that compare nothing need not wait.
    import numba

    compile_kept, compile_anew = (
        numba.njit(signature, nogil=True, fastmath=set(liberties), error_model="numpy", cache=cache)
        for cache in (True, False)
    )
    try:
        return cast("Callable[P, R]", compile_kept(function))
    except Exception:
        # Nowhere to keep it, a full disk, a damaged file: numba has no one error for these. One in the function
        # itself comes again below.
        return cast("Callable[P, R]", compile_anew(function))
