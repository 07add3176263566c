"""Errors that mm2 raises on purpose, as one tree; the class decides the exit code. And functions that word them.

    Mm2Error
    ├── UsageError              the command or call was wrong                       exit 2
    └── CannotRunError          the request was fine, but it could not be done      exit 3
        ├── CheckpointError     a checkpoint is missing, damaged or not a MiniMax-M2
        │   └── UnsupportedModelError  mm2 does not compute, or not read, what its config.json describes
        ├── CaptureError        a capture directory is missing, damaged or in use
        ├── IncomparableError   two captures must not be judged against each other
        ├── GoldenRefusedError  a golden fell into one of the known traps
        ├── TargetError         the port under test could not be built or loaded
        ├── BackendError        the device asked for is not there
        ├── MemoryBudgetError   what comes next would break the memory budget (in machine/memory.py)
        ├── RemoteError         a folder at a remote address cannot be read or written
        │   └── NetworkLossError    its server does not answer
        ├── RankLostError       another rank died or cannot be reached (in ranks/failure.py)
        └── MissingExtraError   a package that this command needs is not installed

A message has three parts: what and where, expected against found, the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

Range = tuple[int, int]  # both ends included


def number_ranges(numbers: Iterable[int]) -> tuple[Range, ...]:
    """Return different ascending numbers as ranges."""
    ranges: list[Range] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)


def word_ranges(ranges: Iterable[Range]) -> list[str]:
    """Return ranges in words, such as `0-3` and `5`."""
    return [f"{low}" if low == high else f"{low}-{high}" for low, high in ranges]


_NUM_FAULTS_SHOWN = 12
# Longest text of a file's value that a message shows.
_LONGEST_VALUE = 200
# As in pyproject.toml. Packages, not extras of mm2, because mm2 is not on the package index.
EXTRA_REQUIREMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "golden": ("accelerate>=1.15", "transformers>=5.23"),
        "remote": ("s3fs>=2024.2",),
        "report": ("vl-convert-python>=1.9",),
        "xla": ("torch==2.9.*", "torch_xla==2.9.*"),
    }
)


class Mm2Error(Exception):
    """An error with a message of three parts.

    Args:
        what: Failure, and its place.
        expected: Expected state, if it adds to `what`.
        found: State that was found instead.
        next_step: Advice to the reader.
        commands: Complete commands that carry the advice out.
    """

    exit_code = 3

    def __init__(
        self,
        what: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        next_step: str | None = None,
        commands: tuple[str, ...] = (),
    ) -> None:
        self.what = what
        self.expected = expected
        self.found = found
        self.next_step = next_step
        self.commands = commands
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [self.what]
        if self.expected is not None and self.found is not None:
            parts.append(f"expected {self.expected}, found {self.found}")
        elif self.expected is not None:
            parts.append(f"expected {self.expected}")
        elif self.found is not None:
            parts.append(f"found {self.found}")
        message = ": ".join(parts)
        return f"{message}. {self.next_step}" if self.next_step else message


class UsageError(Mm2Error):
    """The command line or the call is wrong."""

    exit_code = 2


class CannotRunError(Mm2Error):
    """The request is right, but cannot be carried out."""


class CheckpointError(CannotRunError):
    """A checkpoint is missing, damaged, or not a MiniMax-M2."""


class UnsupportedModelError(CheckpointError):
    """A config.json describes a computation or a weight format that mm2 does not know."""


class CaptureError(CannotRunError):
    """A capture directory is missing, damaged, or in use."""


class IncomparableError(CannotRunError):
    """Two captures must not be judged against each other."""


class GoldenRefusedError(CannotRunError):
    """A golden fell into one of the known traps and must not be trusted."""


class TargetError(CannotRunError):
    """The port under test cannot be found, built, loaded or run."""


class BackendError(CannotRunError):
    """The device backend is not available here."""


class RemoteError(CannotRunError):
    """A folder at a remote address cannot be read or written."""


class NetworkLossError(RemoteError):
    """The server of a remote address does not answer, or breaks off: a copy on this machine may serve."""


class MissingExtraError(CannotRunError):
    """A package that this command needs is not installed."""

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed here",
            next_step=f"Install it with: {install_command(extra)}",
            commands=(install_command(extra),),
        )


def install_command(extra: str) -> str:
    """Return the pip command that installs the packages of `extra`."""
    return "pip install " + " ".join(f"'{requirement}'" for requirement in EXTRA_REQUIREMENTS[extra])


@contextmanager
def naming(path: Path | None) -> Iterator[None]:
    """Put the name of a file before the usage errors of a block that judges what the file holds; None changes nothing.

    Raises:
        UsageError: The block raised one.
    """
    try:
        yield
    except UsageError as error:
        if path is None:
            raise
        raise UsageError(
            f"{path}: {error.what}",
            expected=error.expected,
            found=error.found,
            next_step=error.next_step,
            commands=error.commands,
        ) from error


def list_names(names: list[str], *, most: int) -> str:
    """Join names into one text: the first `most`, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def list_faults(faults: list[str]) -> str:
    """Join faults into one text for an error's `found`: the first 12, and the number of the others."""
    shown = faults[:_NUM_FAULTS_SHOWN]
    if len(faults) > len(shown):
        shown.append(f"and {len(faults) - len(shown)} more")
    return "; ".join(shown)


def shorten(text: str) -> str:
    """Return a text that a message quotes, cut to 200 characters: a damaged file may hold a value of any length."""
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE]}… ({len(text):,} characters)"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural except for one: `1 fault`, `0 faults`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean …?` with up to three known names; an empty text if none is near."""
    by_lower_case = {one.lower(): one for one in known}
    near = [by_lower_case[one] for one in get_close_matches(name.lower(), list(by_lower_case))]
    return f"Did you mean {' or '.join(near)}?" if near else ""
