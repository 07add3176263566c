"""Loops over arrays that numba compiles at their first call.

A compiled loop runs without Python's lock, so threads run it in parallel. numba keeps the machine code for other
processes in `__pycache__` beside the source. If that folder is read-only, it uses the user's cache folder. What it
keeps is proved before it is used (`compiled_cache`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from minimax_tools.machine.compiled_cache import CompiledCache

P = ParamSpec("P")
R = TypeVar("R")

# Held while a loop is compiled: other threads wait instead of compiling the same loop again.
_LOCK = threading.Lock()


def compiled(*signatures: str, sums_in_any_order: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function of arrays and numbers, so that its first call compiles it.

    Args:
        signatures: The only argument types that the function takes, in numba's notation: `(float64[::1], float64)`.
        sums_in_any_order: Whether sums and products may be regrouped, for vector instructions. NaN and Inf keep their
            meaning.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        machine_code: Callable[P, R] | None = None

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal machine_code
            if machine_code is None:
                with _LOCK:
                    # Asked again: another thread may have compiled it while this one waited.
                    if machine_code is None:
                        machine_code = _compile(function, signatures, sums_in_any_order=sums_in_any_order)
            return machine_code(*args, **kwargs)

        return call

    return decorate


def _compile(
    function: Callable[P, R], signatures: tuple[str, ...], *, sums_in_any_order: bool
) -> Callable[P, R]:
    # The import takes half a second. Commands that run no compiled loop do without it.
    import numba

    fastmath = {"reassoc"} if sums_in_any_order else set()
    # With error_model="numpy", a division by zero gives Inf or NaN instead of an exception.
    njit = functools.partial(numba.njit, list(signatures), nogil=True, fastmath=fastmath, error_model="numpy")
    try:
        kept = CompiledCache.of(function)
        with kept.held():
            kept.prove()
            machine_code = njit(cache=True)(function)
            kept.note()
        return cast("Callable[P, R]", machine_code)
    except Exception:
        # numba raises errors of many kinds if its cache is damaged or cannot be written. Without the cache, only an
        # error of the function itself is raised again.
        return cast("Callable[P, R]", njit(cache=False)(function))
