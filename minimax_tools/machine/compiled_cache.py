"""CompiledCache: the machine code of one loop that numba keeps in files, proved before numba loads it.

numba runs what its files hold, and damaged machine code ends the process. So mm2 writes the sha256 of each file when
numba has written them, and removes files of another sha256 before numba reads them: numba then compiles the loop anew.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimax_tools.machine.file_digest import digest_file
from minimax_tools.machine.json_file import JsonError, read_json
from minimax_tools.machine.whole_file import whole_file

_NAMES_OF_NUMBA = (".nbi", ".nbc")  # its index of a loop, and the machine code


@dataclass(frozen=True, slots=True)
class CompiledCache:
    """The kept machine code of a loop."""

    folder: Path
    loop: str  # beginning of the names of its files

    @classmethod
    def of(cls, function: Callable[..., Any]) -> CompiledCache:
        """Find the folder where numba keeps a function's machine code.

        Raises:
            RuntimeError: numba finds no folder that it can write to.
        """
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
        with (self.folder / f"{self.loop}lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
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
