"""Schedule: the tokens of each request in each forward pass of a serving engine; TokenRows: those of each prompt.

A long prompt is computed in several passes (chunks), and then a token of each prompt in every pass (decoding). A pass
holds tokens of several requests one after another; a dump records the position of each row's token in its prompt. Rows
with the positions 5 6 7 0 1 are three tokens of one request, and two of the next. A run without a cache computes the
whole prompt in every pass: of such passes the longest is read.

A dump without records has its prompts' tokens one after another, or in rows that are padded to one length: the shapes
of its tensors tell. B prompts in a pass, S' their padded length, T' rows of its tensors, F channels.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import torch

from minimax_tools.errors import CaptureError, IncomparableError

_NAME_THE_PASSES = (
    "Name the passes to read (steps in a map): an inner list for passes that follow each other."
)
_NAME_THE_ROWS = "Name the rows in a map: lengths, padding (left or right), rows (padded or packed)."
_NUM_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """A dump's record of one forward pass."""

    step: str  # label of the pass
    requests: tuple[str, ...]  # names of the requests, in the order of their rows
    positions: tuple[int, ...]  # position in its prompt of each row's token; rows of padding may follow
    # Tokens of each request that are computed when the pass ends; empty if not recorded.
    ends: tuple[int, ...] = ()
    # Whether each request has one row, unless the pass computes a whole prompt again.
    is_decode: bool = False
    # Number of the data-parallel replica that ran the pass, from 0, and how many there are.
    replica: tuple[int, int] = (0, 1)

    def stretches(self) -> Iterator[tuple[str, Stretch]]:
        """Yield each request with its rows, without padding.

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
                    next_step=_NAME_THE_PASSES,
                )
            start = self.positions[row]
            length = self._length(number, first_row=row)
            yield request, Stretch(step=self.step, number=number, row=row, start=start, length=length)
            row += length

    def _length(self, number: int, *, first_row: int) -> int:
        """Return the number of rows of the request of this number."""
        start = self.positions[first_row]
        if self.is_decode and not self.is_whole_prompt:
            return 1
        if self.ends:
            return max(self.ends[number] - start, 1)  # a request in a pass has a row at least
        positions = self.positions[first_row:]
        length = 1
        while length < len(positions) and positions[length] == start + length:
            length += 1
        return length

    @property
    def is_whole_prompt(self) -> bool:
        """True if the rows are one request's tokens from its first on, without padding, as in a run without a cache."""
        return len(self.requests) == 1 and self.positions == tuple(range(len(self.positions)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive tokens of one request, computed in one pass."""

    step: str  # label of the pass
    number: int  # number of the request among those of the pass, in the order of their rows
    row: int  # row of the first token in the pass's tensors; 0 where their shapes must tell
    start: int  # position of the first token in the prompt
    length: int  # number of tokens
    is_cut: bool = False  # whether the pass holds more tokens of the request

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.start + self.length

    def up_to(self, stop: int) -> Stretch:
        """Return the tokens before a position."""
        length = min(self.length, stop - self.start)
        return replace(self, length=length, is_cut=length < self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """The rows of one pass's tensors."""

    num_requests: int  # requests, or prompts, of which the pass holds tokens
    num_rows: int
    is_exact: bool  # whether tensors have just so many rows; else as many or more, because padding may follow

    def are_held(self, num_rows: int) -> bool:
        """Decide whether a tensor with so many rows has one for each token."""
        return num_rows == self.num_rows if self.is_exact else num_rows >= self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The passes of a dump, joined along the prompts."""

    stretches: Mapping[str, tuple[Stretch, ...]]  # of each request, from its first token on, without gaps
    passes: Mapping[str, PassRows]  # by label
    # Errors to raise if one of these requests is meant: a token of it, or of one beside it in a pass, was computed in
    # no pass or in two.
    broken: Mapping[str, CaptureError] = field(default_factory=dict)
    # Labels of passes that are not read: a longer one has tokens of the same request from its first on.
    repeated: frozenset[str] = frozenset()

    @classmethod
    def of(cls, passes: Iterable[PassRecord]) -> Schedule:
        """Join passes, whatever their order.

        Raises:
            CaptureError: A pass does not tell whose rows it has, or each request has a token that was computed in no
                pass or in two.
        """
        passes = tuple(passes)
        found: dict[str, list[Stretch]] = defaultdict(list)
        rows: dict[str, PassRows] = {}
        cached = {request for record in passes if not record.is_whole_prompt for request in record.requests}
        for record in passes:
            num_rows = 0
            for request, stretch in record.stretches():
                found[request].append(stretch)
                num_rows = stretch.row + stretch.length
            rows[record.step] = PassRows(
                num_requests=len(record.requests),
                num_rows=num_rows if record.ends else len(record.positions),
                is_exact=not record.ends,
            )
        joined = {
            request: _join(found[request], is_cached=request in cached)
            for request in sorted(found, key=_natural)
        }
        broken = {
            request: error
            for request, stretches in joined.items()
            if (error := _find_gap(request, stretches)) is not None
        }
        # Rows of a request beside a broken one may have been taken for the other's.
        for record in passes:
            errors = [broken[request] for request in record.requests if request in broken]
            if errors and not record.is_decode:
                broken |= {request: broken.get(request, errors[0]) for request in record.requests}
        if broken and len(broken) == len(joined):
            raise next(iter(broken.values()))
        read = {stretch.step for stretches in joined.values() for stretch in stretches}
        return cls(
            repeated=frozenset(
                record.step for record in passes if record.requests and record.step not in read
            ),
            stretches={request: joined[request] for request in joined if request not in broken},
            broken=broken,
            passes=rows,
        )

    @property
    def requests(self) -> tuple[str, ...]:
        """The requests of which all tokens are held, in the natural order of their names."""
        return tuple(self.stretches)

    def length(self, request: str) -> int:
        """Return the number of a request's tokens."""
        return self.stretches[request][-1].stop

    def choose(self, lengths: tuple[int, ...], *, named: tuple[str, ...], directory: Path) -> tuple[str, ...]:
        """Choose the requests of prompts with these lengths: by name, else by unique length, else in order.

        `named` are the requests that the map or the tokens tell, in the prompts' order; empty if neither does.

        Raises:
            CaptureError: The map names a request that is not there, nothing tells which of several is meant, or a token
                of a chosen request was computed in no pass or in two.
            IncomparableError: A request has fewer tokens than its prompt.
        """
        chosen = named or self._by_length(lengths) or self.requests
        unknown = [request for request in chosen if request not in self.stretches]
        are_told = len(chosen) == len(lengths)
        meant = [error for request, error in self.broken.items() if not are_told or request in unknown]
        if meant:
            raise meant[0]
        if unknown or not are_told:
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

    def rows(self, requests: tuple[str, ...], lengths: tuple[int, ...] = ()) -> TokenRows:
        """Return the rows of these requests, one for each prompt; with `lengths`, of so many tokens of each."""
        return TokenRows(
            stretches=tuple(
                tuple(stretch.up_to(length) for stretch in self.stretches[request] if stretch.start < length)
                for request, length in zip(requests, lengths or map(self.length, requests), strict=True)
            ),
            passes=self.passes,
        )

    def _by_length(self, lengths: tuple[int, ...]) -> tuple[str, ...]:
        """Return the only request of each prompt's length; none if lengths do not tell them apart."""
        by_length: dict[int, list[str]] = defaultdict(list)
        for request in self.requests:
            by_length[self.length(request)].append(request)
        are_unique = len(set(lengths)) == len(lengths)
        if not are_unique or any(len(by_length[length]) != 1 for length in lengths):
            return ()
        return tuple(by_length[length][0] for length in lengths)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Padding:
    """The place of prompts' tokens among the rows of a pass, as its tensors' shapes tell it."""

    side: str  # side on which rows are padded: `right` or `left`
    # Whether the prompts' tokens lie one after another; None if a tensor's shape must tell.
    is_packed: bool | None
    # bool [B,S'] of a pass, by its label, True on real tokens; in place of `side` where rows are padded.
    masks: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def find_rows(
        self, lengths: tuple[int, ...], shape: tuple[int, ...], *, step: str, what: str
    ) -> torch.Tensor:
        """Find the rows of prompts of these lengths in a tensor of rows [B,S'] or [T']: int64, prompt after prompt."""
        mask, num_rows = self.masks.get(step), math.prod(shape)
        are_packed = self._are_packed(shape, lengths, mask, what=what)
        held = torch.tensor([sum(lengths)] if are_packed else lengths)[:, None]
        width = num_rows // len(held)
        if not are_packed and mask is not None:
            if tuple(mask.shape) != (len(held), width):
                raise CaptureError(
                    f"{what} is of another batch than the attention mask",
                    expected=f"[B,S] of {tuple(mask.shape)}",
                    found=str((len(held), width)),
                    next_step=_NAME_THE_ROWS,
                )
            return mask.flatten().nonzero()[:, 0]
        if width < int(held.max()):
            raise CaptureError(
                f"{what} holds fewer rows than the prompts have tokens",
                expected=f"prompts of {word_lengths(lengths)} tokens",
                found=_word_rows(shape),
                next_step="Choose other passes (steps in a map), or run both sides on the same prompts.",
            )
        columns = torch.arange(width)
        is_real = columns >= width - held if self.side == "left" else columns < held
        return is_real.flatten().nonzero()[:, 0]

    def _are_packed(
        self, shape: tuple[int, ...], lengths: tuple[int, ...], mask: torch.Tensor | None, *, what: str
    ) -> bool:
        """Decide whether the prompts' tokens lie one after another, not padded to one length."""
        num_prompts, num_rows = len(lengths), math.prod(shape)
        if len(shape) == 2 and shape[0] == num_prompts:
            return False
        is_flat = len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)
        if is_flat and self.is_packed is None:
            is_of_mask = mask is not None and num_rows == mask.numel()
            if is_of_mask or num_prompts == 1 or num_rows == sum(lengths):
                return not is_of_mask
        elif is_flat and (self.is_packed or num_rows % num_prompts == 0):
            return bool(self.is_packed)
        raise CaptureError(
            f"{what}: nothing tells which rows are real",
            expected=f"prompts of {word_lengths(lengths)} tokens as [{num_prompts},S,F], or one after another",
            found=_word_rows(shape),
            next_step=_NAME_THE_ROWS,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRows:
    """The rows of a dump's tensors that are real tokens of its prompts."""

    stretches: tuple[tuple[Stretch, ...], ...]  # of each prompt, in the order of its tokens
    passes: Mapping[str, PassRows]  # by label
    padding: Padding | None = None  # tells the stretches' rows; None if they are known

    @classmethod
    def divide(
        cls, lengths: tuple[int, ...], counts: tuple[Mapping[str, int], ...], padding: Padding
    ) -> TokenRows:
        """Divide the tokens of prompts with these lengths among the passes of a dump without records.

        `counts` are the rows of each pass, by label, for passes that follow each other: of all prompts, or of each.
        """
        if len(counts) == 1:
            stretches = _divide_group(lengths, counts[0])
        else:
            pairs = zip(lengths, counts, strict=True)
            stretches = tuple(_divide_group((length,), group)[0] for length, group in pairs)
        passes = {}
        for step in dict.fromkeys(stretch.step for of_prompt in stretches for stretch in of_prompt):
            in_pass = [stretch for of_prompt in stretches for stretch in of_prompt if stretch.step == step]
            num_rows = sum(stretch.length for stretch in in_pass)
            passes[step] = PassRows(num_requests=len(in_pass), num_rows=num_rows, is_exact=False)
        return cls(stretches=stretches, passes=passes, padding=padding)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of real tokens of each prompt, in all passes together."""
        return tuple(sum(stretch.length for stretch in of_prompt) for of_prompt in self.stretches)

    @property
    def steps(self) -> tuple[str, ...]:
        """Labels of the passes that hold the tokens."""
        return tuple(dict.fromkeys(stretch.step for of_prompt in self.stretches for stretch in of_prompt))

    def in_pass(self, step: str) -> list[tuple[int, Stretch]]:
        """Return the stretches in a pass, each with the number of its prompt."""
        return [
            (prompt, stretch)
            for prompt, of_prompt in enumerate(self.stretches)
            for stretch in of_prompt
            if stretch.step == step
        ]

    def find(self, step: str, shape: tuple[int, ...], *, what: str) -> torch.Tensor:
        """Find the rows of a pass's stretches in a tensor with rows of this shape: int64, stretch after stretch.

        Raises:
            CaptureError: A tensor of this shape, which `what` names, does not hold the rows, or does not tell them.
        """
        stretches = [stretch for _, stretch in self.in_pass(step)]
        if self.padding is not None:
            lengths = tuple(stretch.length for stretch in stretches)
            return self.padding.find_rows(lengths, shape, step=step, what=what)
        rows, num_rows = self.passes[step], math.prod(shape)
        # All dims but one have size 1: [T',N] would be rows of several values each.
        if num_rows != max(shape, default=0) or not rows.are_held(num_rows):
            raise CaptureError(
                f"{what} does not hold the rows that the pass is said to have",
                expected=f"{rows.num_rows}{'' if rows.is_exact else ' or more'} rows",
                found=_word_rows(shape),
                next_step=_NAME_THE_ROWS,
            )
        return torch.cat([torch.arange(one.row, one.row + one.length) for one in stretches])


def word_lengths(lengths: tuple[int, ...]) -> str:
    """Return lengths in words, such as `48, 33`."""
    return ", ".join(str(length) for length in lengths)


def _word_rows(shape: tuple[int, ...]) -> str:
    return f"rows [{','.join(map(str, shape))}]"


def _divide_group(lengths: tuple[int, ...], counts: Mapping[str, int]) -> tuple[tuple[Stretch, ...], ...]:
    """Divide the prompts' tokens among passes that follow each other, given the rows of each pass.

    Passes whose rows add up to a single prompt are its chunks. Else the first pass is a prefill, which may be padded,
    and each of the others decodes one row of each prompt.
    """
    num_decoded = len(counts) - 1
    is_chunked = lengths == (sum(counts.values()),)
    if not is_chunked and min(lengths) < num_decoded:
        raise CaptureError(
            f"passes {', '.join(counts)} decode more tokens than a prompt has",
            expected=f"prompts of {num_decoded} tokens or more",
            found=word_lengths(lengths),
            next_step=_NAME_THE_PASSES,
        )
    stretches = []
    for number, length in enumerate(lengths):
        parts = list(counts.values()) if is_chunked else [length - num_decoded, *[1] * num_decoded]
        stretches.append(
            tuple(
                Stretch(step=step, number=number, row=0, start=start, length=part)
                for step, start, part in zip(counts, accumulate(parts, initial=0), parts, strict=False)
            )
        )
    return tuple(stretches)


def _join(stretches: Iterable[Stretch], *, is_cached: bool) -> tuple[Stretch, ...]:
    """Sort a request's stretches; of passes that each compute the whole prompt anew, keep the longest alone.

    With `is_cached`, a pass holds other tokens or requests too, so no pass computes the prompt anew.
    """
    ordered = tuple(sorted(stretches, key=lambda stretch: (stretch.start, stretch.length)))
    is_repeated = len({stretch.length for stretch in ordered}) < len(ordered)
    return ordered if is_cached or is_repeated else ordered[-1:]


def _find_gap(request: str, stretches: tuple[Stretch, ...]) -> CaptureError | None:
    """Return the error of a request of which a token was computed in no pass, or in two; None if it has none."""
    reached = 0
    for stretch in stretches:
        if stretch.start > reached:
            return CaptureError(
                f"tokens {reached} to {stretch.start - 1} of request {request} were computed in no pass",
                expected="all passes of a prompt from its first token on",
                found=f"pass {stretch.step} begins at position {stretch.start}",
                next_step="Capture with prefix caching off, and all passes.",
            )
        if stretch.start < reached:
            return CaptureError(
                f"token {stretch.start} of request {request} was computed in two passes",
                found=f"pass {stretch.step} begins there, and another went to position {reached - 1}",
                next_step="Keep the dump of each run in a folder of its own. Else: " + _NAME_THE_PASSES,
            )
        reached = stretch.stop
    return None


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts `r2` before `r10`: ((-1, "r"), (10, ""), (-1, "")) for the latter."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))
