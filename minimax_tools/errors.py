"""Every error mm2 raises on purpose, as one tree; the class decides the exit code.

    Mm2Error
    ├── UsageError              the command or call was wrong                       exit 2
    └── CannotRunError          the request was fine, but it could not be done      exit 3
        ├── CheckpointError     a checkpoint is missing, damaged or not a MiniMax-M2
        ├── CaptureError        a capture directory is missing, damaged or in use
        ├── IncomparableError   two captures must not be judged against each other
        ├── GoldenRefusedError  a golden fell into one of the known traps
        ├── TargetError         the port under test could not be built or loaded
        ├── BackendError        the device asked for is not there
        ├── MemoryBudgetError   what comes next would break the memory budget
        └── MissingExtraError   a package that this command needs is not installed

A message has three parts: what and where, expected against found, the next step.
"""

from __future__ import annotations

from minimax_tools.extras import install_command
from minimax_tools.size import word_size

_NUM_FAULTS_SHOWN = 12


class Mm2Error(Exception):
    """An error with the three parts that a reader needs.

    Args:
        what: What went wrong, and where.
        expected: What was expected, where that says more than `what` does.
        found: What was there instead.
        next_step: What the reader should do now.
    """

    exit_code = 3

    def __init__(
        self,
        what: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.expected = expected
        self.found = found
        self.next_step = next_step
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
    """The command line or the call was wrong."""

    exit_code = 2


class CannotRunError(Mm2Error):
    """The request was fine, but it could not be carried out."""


class CheckpointError(CannotRunError):
    """A checkpoint is missing, damaged, or not a MiniMax-M2."""


class CaptureError(CannotRunError):
    """A capture directory is missing, damaged, or in use."""


class IncomparableError(CannotRunError):
    """Two captures must not be judged against each other."""


class GoldenRefusedError(CannotRunError):
    """A golden fell into one of the known traps and must not be trusted."""


class TargetError(CannotRunError):
    """The port under test could not be found, built, loaded or run."""


class BackendError(CannotRunError):
    """The device backend asked for is not available here."""


class MemoryBudgetError(CannotRunError):
    """What comes next would take the process above its memory budget; nothing was allocated for it yet.

    Args:
        purpose: What the memory is for, as in "reading layer 7".
        needed_bytes: How much more it takes.
        in_use_bytes: The process's anonymous memory now.
        promised_bytes: What is reserved and not filled yet.
        limit_bytes: The budget.
    """

    def __init__(
        self, purpose: str, *, needed_bytes: int, in_use_bytes: int, promised_bytes: int, limit_bytes: int
    ) -> None:
        self.purpose = purpose
        self.needed_bytes = needed_bytes
        self.in_use_bytes = in_use_bytes
        self.promised_bytes = promised_bytes
        self.limit_bytes = limit_bytes
        total_bytes = in_use_bytes + promised_bytes + needed_bytes
        promised = f", {word_size(promised_bytes)} reserved and not filled yet" if promised_bytes else ""
        super().__init__(
            f"{purpose} would break the memory budget",
            expected=f"at most {word_size(limit_bytes)}",
            found=(
                f"{word_size(in_use_bytes)} in use{promised} and {word_size(needed_bytes)} more needed: "
                f"{word_size(total_bytes - limit_bytes)} too much"
            ),
            next_step=(
                f"Allow {_round_up(total_bytes)} or more, or ask for less at a time: "
                "no prefetch, fewer or shorter prompts."
            ),
        )


class MissingExtraError(CannotRunError):
    """A package that this command needs is not installed."""

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed here",
            next_step=f"Install it with: {install_command(extra)}",
        )


def list_faults(faults: list[str]) -> str:
    """Faults as one text for an error's `found`: as many as a reader can take in, and how many more there are."""
    shown = faults[:_NUM_FAULTS_SHOWN]
    if len(faults) > len(shown):
        shown.append(f"and {len(faults) - len(shown)} more")
    return "; ".join(shown)


def _round_up(num_bytes: int) -> str:
    """The least size that is not below `num_bytes` and has one decimal, as an option takes it: `12.4GB`."""
    step = max(1000 ** ((len(str(num_bytes)) - 1) // 3) // 10, 1)
    return word_size(-(-num_bytes // step) * step).replace(" ", "")
