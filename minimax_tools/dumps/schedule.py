"""Schedule: the tokens of each request in each forward pass of a serving engine.

An engine computes a long prompt in several passes (chunks), then one row of each prompt in every pass (decoding). One
pass holds tokens of several requests. The positions in its dump tell where the row of every token lies.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from minimax_tools.errors import CaptureError, IncomparableError

_STEPS = "Name the passes to read (steps in a map): an inner list for passes that follow each other."
_NUM_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """A dump's record of one forward pass.

    Args:
        requests: The requests, in the order of their rows.
        positions: Each row's position in its prompt; padding rows may follow.
        ends: Tokens of each request computed after the pass; empty if the dump does not tell.
        is_decode: Whether each request has one row.
    """

    step: str
    requests: tuple[str, ...]
    positions: tuple[int, ...]
    ends: tuple[int, ...] = ()
    is_decode: bool = False

    def stretches(self) -> Iterator[tuple[str, Stretch]]:
        """Yield the rows of each request, without padding.

        Raises:
            CaptureError: The positions do not tell whose rows they are.
        """
        row = 0
        for number, request in enumerate(self.requests):
            if row >= len(self.positions):
                raise CaptureError(
                    f"pass {self.step} does not tell which rows are of request {request}",
                    expected=f"runs of positions of {len(self.requests)} requests",
                    found=f"{number}",
                    next_step=_STEPS,
                )
            start = self.positions[row]
            length = self._length(number, row)
            yield request, Stretch(step=self.step, row=row, start=start, length=length)
            row += length

    def _length(self, number: int, row: int) -> int:
        start = self.positions[row]
        if self.is_decode:
            return 1
        if self.ends:
            return max(self.ends[number] - start, 1)
        run = 1
        while row + run < len(self.positions) and self.positions[row + run] == start + run:
            run += 1
        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive tokens of one request, computed in one pass.

    Args:
        row: Row of the first token in the pass's tensors.
        start: Position of the first token in the prompt.
        length: Number of tokens.
    """

    step: str
    row: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.start + self.length

    def up_to(self, stop: int) -> Stretch:
        """Return the tokens before a position."""
        return replace(self, length=min(self.length, stop - self.start))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The passes of a dump, joined along the prompts.

    Args:
        stretches: Stretches of each request by position, from the first token on, without gaps.
        num_rows: Rows of each pass, padding included, if the dump tells.
    """

    stretches: Mapping[str, tuple[Stretch, ...]]
    num_rows: Mapping[str, int]

    @classmethod
    def of(cls, passes: Iterable[PassRecord]) -> Schedule:
        """Join passes, whatever their order.

        Raises:
            CaptureError: A pass does not tell whose rows it has, or a token was computed in no pass or in two.
        """
        passes = tuple(passes)
        found: dict[str, list[Stretch]] = defaultdict(list)
        for record in passes:
            for request, stretch in record.stretches():
                found[request].append(stretch)
        joined = {
            request: tuple(sorted(found[request], key=lambda stretch: stretch.start))
            for request in sorted(found, key=_natural)
        }
        for request, stretches in joined.items():
            _refuse_gaps(request, stretches)
        return cls(
            stretches=joined,
            num_rows={record.step: len(record.positions) for record in passes if not record.ends},
        )

    @property
    def requests(self) -> tuple[str, ...]:
        """The requests, in the natural order of their names."""
        return tuple(self.stretches)

    def length(self, request: str) -> int:
        """Return the number of a request's tokens."""
        return self.stretches[request][-1].stop

    def choose(self, lengths: tuple[int, ...], *, named: tuple[str, ...], directory: Path) -> tuple[str, ...]:
        """Choose the requests of prompts with these lengths: by name, else by unique length, else in order.

        Raises:
            CaptureError: The map names a request that is not there, or nothing tells which of several is meant.
            IncomparableError: A request has fewer tokens than its prompt.
        """
        chosen = named or self._by_length(lengths) or self.requests
        unknown = [request for request in chosen if request not in self.stretches]
        if unknown or len(chosen) != len(lengths):
            raise CaptureError(
                f"{directory}: which requests are the prompts cannot be told",
                expected=f"{len(lengths)} requests, of {word_lengths(lengths)} tokens",
                found=", ".join(
                    f"{request} of {self.length(request)}" for request in self.requests[:_NUM_NAMED]
                )
                + (" …" if len(self.requests) > _NUM_NAMED else ""),
                next_step="Name them in the prompts' order as requests in a map.",
            )
        for request, length in zip(chosen, lengths, strict=True):
            if self.length(request) < length:
                raise IncomparableError(
                    f"{directory} holds fewer tokens of request {request} than its prompt has",
                    expected=f"{length} tokens",
                    found=f"{self.length(request)}, in passes "
                    + ", ".join(stretch.step for stretch in self.stretches[request][:_NUM_NAMED]),
                    next_step="Capture all passes of the prompt, or run both sides on the same prompts.",
                )
        return chosen

    def _by_length(self, lengths: tuple[int, ...]) -> tuple[str, ...]:
        """Return the only request of each prompt's length; none if lengths do not tell them apart."""
        own = {self.length(request): request for request in self.requests}
        if len(own) != len(self.requests) or len(set(lengths)) != len(lengths) or own.keys() != set(lengths):
            return ()
        return tuple(own[length] for length in lengths)


def _refuse_gaps(request: str, stretches: tuple[Stretch, ...]) -> None:
    reached = 0
    for stretch in stretches:
        if stretch.start > reached:
            raise CaptureError(
                f"tokens {reached} to {stretch.start - 1} of request {request} were computed in no pass",
                expected="all passes of a prompt from its first token on",
                found=f"pass {stretch.step} begins at position {stretch.start}",
                next_step="Capture with prefix caching off, and all passes. Else: " + _STEPS,
            )
        if stretch.start < reached:
            raise CaptureError(
                f"token {stretch.start} of request {request} was computed in two passes",
                found=f"pass {stretch.step} begins there, and another went to position {reached - 1}",
                next_step="Keep the dump of each run in a folder of its own. Else: " + _STEPS,
            )
        reached = stretch.stop


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))


def word_lengths(lengths: tuple[int, ...]) -> str:
    """Return lengths in words, such as `48, 33`."""
    return ", ".join(str(length) for length in lengths)
