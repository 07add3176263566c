"""Loops over arrays that numba compiles at their first call, and a pool of threads that run them, one for each core.

A compiled loop runs without Python's lock. numba keeps the machine code for other processes in `__pycache__` beside the
source, or in the user's cache folder. It runs what its files hold, and damaged machine code ends the process. So mm2
writes down the sha256 of each file, and removes files of another sha256 before numba reads them.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch

from minimax_tools.machine.files import digest_file, hold_file, whole_file
from minimax_tools.machine.json_file import JsonError, read_json

_NAMES_OF_NUMBA = (".nbi", ".nbc")  # its index of a loop, and the machine code


@dataclass(frozen=True, slots=True)
class CompiledCache:
    """The kept machine code of a loop."""

    folder: Path
    loop: str  # beginning of the names of its files

    @classmethod
    def of(cls, function: Callable[..., Any]) -> CompiledCache:
        """Find the folder where numba keeps a function's machine code."""
        from numba.core.caching import FunctionCache

        source = Path(function.__code__.co_filename)
        folder: str = FunctionCache(function).cache_path
        return cls(Path(folder), f"{source.stem}.{function.__qualname__}-")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from the files during the block: they wait.

        numba numbers the files of a loop's types one after the other, by its index. Two processes that write at once
        may give one number to two types.

        Raises:
            OSError: The folder cannot be written to, or has no locks.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with hold_file(self.folder / f"{self.loop}lock", waits=True):
            yield

    def prove(self) -> None:
        """Remove the files unless each has the bytes that numba wrote."""
        files = self._files()
        try:
            is_proved = bool(files) and read_json(self._record) == _digests(files)
        except (OSError, JsonError):
            is_proved = False
        if not is_proved:
            for path in files:
                path.unlink(missing_ok=True)

    def note(self) -> None:
        """Write down the bytes of the files; without this they are removed at the next proof."""
        with suppress(OSError):
            digests = _digests(self._files())
            if digests:
                with whole_file(self._record) as file:
                    json.dump(digests, file)

    @property
    def _record(self) -> Path:
        return self.folder / f"{self.loop}sha256.json"

    def _files(self) -> list[Path]:
        found = self.folder.glob(f"{self.loop}*") if self.folder.is_dir() else ()
        return sorted(path for path in found if path.suffix in _NAMES_OF_NUMBA)


def _digests(files: list[Path]) -> dict[str, str]:
    return {path.name: digest_file(path) for path in files}


T = TypeVar("T")


class CorePool(ThreadPoolExecutor):
    """Threads for many independent pieces of work, one piece on each core.

    Args:
        name: Name of the threads.
        num_threads: Number of threads; None for the number of threads that torch is set to.
    """

    def __init__(self, name: str, num_threads: int | None = None) -> None:
        self._num_torch_threads = torch.get_num_threads()
        self._num_threads = num_threads or self._num_torch_threads
        super().__init__(
            self._num_threads,
            thread_name_prefix=f"mm2-{name}",
            # torch keeps its own number for each thread: each thread of the pool computes alone.
            initializer=lambda: torch.set_num_threads(1),
        )

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """Call a function on each core; see `concurrent.futures`.

        On one core the caller would only wait for the thread. It computes each result itself, when it is taken.
        """
        if self._num_threads == self._num_torch_threads == 1 and timeout is None:
            return map(fn, *iterables)
        return super().map(fn, *iterables, timeout=timeout, chunksize=chunksize)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads; see `concurrent.futures`."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        # The number set last also holds for threads that begin later, so the pool's 1 must not stay.
        torch.set_num_threads(self._num_torch_threads)


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
