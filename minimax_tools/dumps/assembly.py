"""DumpAssembly: a site's real tokens, put together from the pieces of ranks and passes.

A pass is one forward pass of the dumped run; `step` is its label. A group is passes that follow each other for the same
prompts, such as a prefill and the decoded tokens behind it. A term is a tensor that a site is a sum of. In messages,
`what` is the name of what is read.

B prompts, S their padded length, T real tokens of all prompts, T' rows of one pass, F channels, N heads, D head_dim.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from minimax_tools.dumps.found_sites import FoundSite, FoundSites, SiteTerm, rows_dim
from minimax_tools.dumps.schedule import Stretch, word_lengths
from minimax_tools.dumps.tensor_file import read_tensor
from minimax_tools.errors import CaptureError, TargetError
from minimax_tools.model.site_layouts import Replicated, are_equal_bits

_NAME_THE_ROWS = "Name the rows in a map: lengths, padding (left or right), rows (padded or packed)."
# Running sums kept of a pass: a layer's input, the stream behind its attention, and its output.
_NUM_SUMS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRows:
    """The rows of a dump's tensors that are real tokens of its prompts."""

    lengths: tuple[int, ...]  # number of real tokens of each prompt, in all passes together
    padding: str  # side on which rows are padded: `right` or `left`
    # Whether the prompts' tokens lie one after another; None if a tensor's shape must tell.
    is_packed: bool | None
    # bool [B,S'] of the first pass, True on real tokens; in place of lengths and padding where rows are padded.
    mask: torch.Tensor | None = None
    # Each prompt's rows in the passes; empty if not recorded. If given, callers take them by `take_stretch`, and call
    # none of the methods below.
    stretches: tuple[tuple[Stretch, ...], ...] = ()

    @property
    def num_tokens(self) -> int:
        """T, the real tokens of all prompts."""
        return sum(self.lengths)

    def take(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        """Take the real tokens [T,F] of [B,S',F], [B·S',F], packed [T',F] or [1,T',F]."""
        if tensor.ndim == 3 and tensor.shape[0] == 1 and (len(self.lengths) > 1 or self.is_packed):
            tensor = tensor[0]  # packed [1,T',F]
        if tensor.ndim == 3 and tensor.shape[0] == len(self.lengths):
            return self._take_padded(tensor, what=what)
        if tensor.ndim != 2:
            raise _unreadable(tensor, self.lengths, what=what)
        if self._is_packed(tensor, what=what):
            return self._take_packed(tensor, what=what)
        if tensor.shape[0] % len(self.lengths):
            raise _unreadable(tensor, self.lengths, what=what)
        # [B·S',F]
        return self._take_padded(tensor.reshape(len(self.lengths), -1, tensor.shape[-1]), what=what)

    def in_passes(self, counts: Sequence[int]) -> tuple[TokenRows, ...]:
        """Divide the rows among passes that follow each other; `counts` are the rows of each pass's tensors.

        Passes whose rows add up to a single prompt are its chunks. Else the first pass is a prefill, which may be
        padded, and each of the others decodes one row of each prompt.
        """
        if len(counts) == 1:
            return (self,)
        if self.lengths == (sum(counts),):
            return tuple(replace(self, lengths=(count,), mask=None) for count in counts)
        num_decoding = len(counts) - 1
        prefill = replace(self, lengths=tuple(length - num_decoding for length in self.lengths))
        decoding = replace(self, lengths=(1,) * len(self.lengths), mask=None)
        return (prefill, *[decoding] * num_decoding)

    def of_prompt(self, prompt: int) -> TokenRows:
        """Return the rows of one prompt alone."""
        mask = None if self.mask is None else self.mask[prompt : prompt + 1]
        return replace(self, lengths=self.lengths[prompt : prompt + 1], mask=mask)

    def _is_packed(self, tensor: torch.Tensor, *, what: str) -> bool:
        """Decide whether the prompts' tokens in [rows,F] lie one after another, not as [B·S',F]."""
        if self.is_packed is not None:
            return self.is_packed
        if self.mask is not None and tensor.shape[0] == self.mask.numel():
            return False
        if len(self.lengths) == 1 or tensor.shape[0] == self.num_tokens:
            return True
        raise _unreadable(tensor, self.lengths, what=what)

    def _take_packed(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        if tensor.shape[0] < self.num_tokens:
            raise _too_few(tensor, self.lengths, what=what)
        start = tensor.shape[0] - self.num_tokens if self.padding == "left" else 0
        return tensor[start : start + self.num_tokens]

    def _take_padded(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        length = tensor.shape[1]
        if self.mask is not None:
            if tuple(self.mask.shape) != tuple(tensor.shape[:2]):
                raise CaptureError(
                    f"{what} is of another batch than the attention mask",
                    expected=f"[B,S] of {tuple(self.mask.shape)}",
                    found=str(tuple(tensor.shape)),
                    next_step=_NAME_THE_ROWS,
                )
            return tensor[self.mask]
        if length < max(self.lengths):
            raise _too_few(tensor, self.lengths, what=what)
        positions = torch.arange(length)
        lengths = torch.tensor(self.lengths)[:, None]
        is_real = positions >= length - lengths if self.padding == "left" else positions < lengths
        return tensor[is_real]


def take_stretch(tensor: torch.Tensor, stretch: Stretch, *, num_rows: int | None, what: str) -> torch.Tensor:
    """Take the tokens [n,F] of a stretch out of a pass's packed [T',F], [1,T',F] or [T',1,F].

    `num_rows` is T', None if the pass does not tell it; `what` names the tensor in messages.
    """
    if tensor.ndim == 3 and 1 in tensor.shape[:2]:
        tensor = tensor.flatten(0, 1)
    stop = stretch.row + stretch.length
    has_other_rows = num_rows is not None and tensor.shape[0] != num_rows
    if tensor.ndim != 2 or tensor.shape[0] < stop or has_other_rows:
        raise CaptureError(
            f"{what} does not hold the rows that the pass is said to have",
            expected=f"{f'{stop} or more' if num_rows is None else num_rows} rows",
            found=str(list(tensor.shape)),
            next_step=_NAME_THE_ROWS,
        )
    return tensor[stretch.row : stop]


def join_passes(passes: Sequence[torch.Tensor], lengths: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Join the tokens of passes that follow each other to [T,F], by prompt; `lengths` are the prompts' in each pass."""
    by_pass = [tokens.split(of_prompts) for tokens, of_prompts in zip(passes, lengths, strict=True)]
    by_prompt = zip(*by_pass, strict=True)
    return torch.cat([tokens for of_prompt in by_prompt for tokens in of_prompt])


def choose_passes(counts: Mapping[str, int], lengths: tuple[int, ...]) -> tuple[tuple[str, ...], ...] | None:
    """Choose passes that have the prompts' tokens, as groups that follow each other; None if none do.

    `counts` are the rows of each pass, by label and in the passes' order. In this order of preference:

    - all passes follow each other: the chunks of one prompt, or a prefill and decoded tokens
    - one pass has all tokens
    - a prompt's tokens are those of one pass, or of passes that follow each other
    """
    labels, batch = tuple(counts), len(lengths)
    num_decoded = len(labels) - 1
    is_decoding = all(counts[label] == batch for label in labels[1:])
    if sum(counts.values()) == sum(lengths) and (batch == 1 or is_decoding or not num_decoded):
        return (labels,)
    for label in labels:
        if counts[label] == sum(lengths):
            return ((label,),)
    groups: list[tuple[str, ...]] = []
    left = list(labels)
    for length in lengths:
        group = _find_group(left, counts, length)
        if group is None:
            return None
        groups.append(group)
        left = [label for label in left if label not in group]
    return tuple(groups)


def _find_group(labels: Sequence[str], counts: Mapping[str, int], length: int) -> tuple[str, ...] | None:
    """Find the first passes in a row that have so many rows together."""
    for start in range(len(labels)):
        for stop in range(start + 1, len(labels) + 1):
            if sum(counts[label] for label in labels[start:stop]) == length:
                return tuple(labels[start:stop])
    return None


def lay_out(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Lay tokens [T,F] out on the real places of a batch, [B,S,F]; zeros on its padding."""
    batch = tokens.new_zeros((*mask.shape, tokens.shape[-1]))
    batch[mask] = tokens
    return batch


def batch_mask(lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the mask, bool [B,S], of prompts padded on the right to the longest."""
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


def _too_few(tensor: torch.Tensor, lengths: tuple[int, ...], *, what: str) -> CaptureError:
    return CaptureError(
        f"{what} holds fewer rows than the prompts have tokens",
        expected=f"prompts of {word_lengths(lengths)} tokens",
        found=str(list(tensor.shape)),
        next_step="Choose other passes (steps in a map), or run both sides on the same prompts.",
    )


def _unreadable(tensor: torch.Tensor, lengths: tuple[int, ...], *, what: str) -> CaptureError:
    return CaptureError(
        f"{what}: nothing tells which rows are real",
        expected=f"prompts of {word_lengths(lengths)} tokens as [{len(lengths)},S,F], or one after another",
        found=str(list(tensor.shape)),
        next_step=_NAME_THE_ROWS,
    )


class TokenKind(Enum):
    """The kind of value that a tensor holds for each token."""

    CHANNELS = "channels"  # in tensors [B,S,F]
    HEADS = "heads"  # in tensors [B,N,S,D]
    NUMBER = "number"  # in tensors [B,S]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpAssembly:
    """The tensors of a dump, read one site at a time."""

    found: FoundSites  # the dump's sites, and the groups of passes to read, `found.passes`
    # Of each pass, the last running sums by the modules of their terms: the next layer's sum continues one of them.
    _sums: dict[str, dict[tuple[str, ...], torch.Tensor]] = field(
        default_factory=lambda: defaultdict(dict), repr=False
    )

    def read_pass(self, site: FoundSite, step: str, *, what: str) -> torch.Tensor:
        """Read a site from one pass, padding included, in mm2's shape of the site."""
        if site.is_running_sum:
            return self._read_running_sum(site.terms, step, what=what)
        terms = [self._read_term(term, step, what=what) for term in site.terms]
        if site.transpose:
            terms = [_transpose(term, site.transpose, what=what) for term in terms]
        if site.is_of_affinities:
            return _weigh_chosen(*terms, what=what)
        if len(terms) == 1:
            return terms[0]
        _refuse_other_shapes(terms, what=what)
        # Kernels add in float32 and round once.
        return torch.stack([term.to(torch.float32) for term in terms]).sum(dim=0).to(terms[0].dtype)

    def _read_running_sum(self, terms: tuple[SiteTerm, ...], step: str, *, what: str) -> torch.Tensor:
        """Add each term to the sum of those before it, rounded to the dtype of the first."""
        modules = tuple(term.module for term in terms)
        sums = self._sums[step]
        num_done = max((len(done) for done in sums if modules[: len(done)] == done), default=0)
        total = sums[modules[:num_done]] if num_done else self._read_term(terms[0], step, what=what)
        for number in range(max(num_done, 1), len(terms)):
            term = self._read_term(terms[number], step, what=what)
            _refuse_other_shapes([total, term], what=what)
            total = (total.to(torch.float32) + term.to(torch.float32)).to(total.dtype)
        sums[modules] = total
        while len(sums) > _NUM_SUMS:
            del sums[next(iter(sums))]
        return total

    def read_tokens(self, site: FoundSite, rows: TokenRows, *, kind: TokenKind, what: str) -> torch.Tensor:
        """Read a site's real tokens, the places of which `rows` tells, from all passes: [T,F], [T,N,D] or [T]."""
        if rows.stretches:
            return self._read_stretches(site, rows, kind=kind, what=what)
        num_groups = len(self.found.passes)
        if num_groups not in (1, len(rows.lengths)):
            raise CaptureError(
                f"{self.found.dump.directory}: which prompts the passes are of cannot be told",
                expected=f"{len(rows.lengths)} passes, one for each prompt, or one for all",
                found=f"{num_groups}",
                next_step="Name them as steps in a map: an inner list for passes that follow each other.",
            )
        try:
            return self._read_groups(site, rows, kind=kind, what=what)
        except CaptureError as error:
            advice = self._advise_on_passes(site, rows, kind=kind)
            if not advice:
                raise
            raise CaptureError(
                error.what, expected=error.expected, found=error.found, next_step=advice
            ) from error

    def _read_stretches(
        self, site: FoundSite, rows: TokenRows, *, kind: TokenKind, what: str
    ) -> torch.Tensor:
        """Read the real tokens of passes that record their requests, one pass in memory at a time.

        A stretch is consecutive tokens of one prompt in one pass.
        """
        wanted = [
            (prompt, stretch) for prompt, stretches in enumerate(rows.stretches) for stretch in stretches
        ]
        num_tokens = {} if self.found.schedule is None else self.found.schedule.num_tokens
        tokens = {}
        for step in dict.fromkeys(stretch.step for _, stretch in wanted):
            in_pass = f"{what} in pass {step}"
            flat, token_shape = _flatten(self.read_pass(site, step, what=in_pass), kind, in_pass)
            for prompt, stretch in wanted:
                if stretch.step == step:
                    taken = take_stretch(flat, stretch, num_rows=num_tokens.get(step), what=in_pass)
                    # Cloned, so that the pass's whole tensor is freed.
                    tokens[prompt, stretch.start] = taken.reshape(len(taken), *token_shape).clone()
        in_order = [tokens[key] for key in sorted(tokens)]  # by prompt, and by position in it
        self._refuse_other_widths((tuple(taken.shape[1:]) for taken in in_order), what=what)
        return torch.cat(in_order)

    def _read_groups(self, site: FoundSite, rows: TokenRows, *, kind: TokenKind, what: str) -> torch.Tensor:
        """Read the real tokens of the groups of passes that the map chose, or of the first pass.

        A single group holds all prompts. Of several groups, the first holds the first prompt, and so on.
        """
        tokens = []
        for number, group in enumerate(self.found.passes):
            group_rows = rows if len(self.found.passes) == 1 else rows.of_prompt(number)
            flats = []
            for step in group:
                in_pass = f"{what} in pass {step}"
                flat, token_shape = _flatten(self.read_pass(site, step, what=in_pass), kind, in_pass)
                flats.append(flat)
            self._refuse_other_widths((tuple(flat.shape[-1:]) for flat in flats), what=what)
            pass_rows = group_rows.in_passes([math.prod(flat.shape[:-1]) for flat in flats])
            taken = [of_pass.take(flat, what=what) for flat, of_pass in zip(flats, pass_rows, strict=True)]
            joined = join_passes(taken, [of_pass.lengths for of_pass in pass_rows])
            tokens.append(joined.reshape(len(joined), *token_shape))
        return torch.cat(tokens)

    def _refuse_other_widths(self, shapes: Iterable[tuple[int, ...]], *, what: str) -> None:
        """Refuse passes whose tokens have values of several shapes."""
        found = sorted(set(shapes))
        if len(found) > 1:
            raise CaptureError(
                f"{self.found.dump.directory}: {what} has other widths in other passes",
                expected="one width",
                found=", ".join("x".join(map(str, shape)) for shape in found),
                next_step="Name passes of one kind as steps in a map, or leave the site's module out.",
            )

    def _advise_on_passes(self, site: FoundSite, rows: TokenRows, *, kind: TokenKind) -> str:
        """Return the next step of an error, for a dump with other passes than those that are read; else empty."""
        if len(self.found.dump.steps) < 2:
            return ""
        reason = f"The passes could not be joined: {self.found.not_joined} " if self.found.not_joined else ""
        chosen = choose_passes(self._count_rows(site, kind), rows.lengths)
        if chosen is None or chosen == self.found.passes:
            return f"{reason}No steps of a map choose passes with these prompts: run both sides on the same ones."
        steps = ", ".join(f"[{', '.join(map(repr, group))}]" for group in chosen)
        return f"{reason}This line of a map (--map FILE) reads passes with as many tokens: steps: [{steps}]"

    def _count_rows(self, site: FoundSite, kind: TokenKind) -> dict[str, int]:
        """Count the rows of each pass, by label, in the pieces of one rank."""
        first = next(iter(site.terms[0].pieces.values()))
        counts: dict[str, int] = {}
        for piece in self.found.dump.pieces:
            is_of_site = (str(piece), piece.rank) == (str(first), first.rank)
            if is_of_site and piece.step not in counts:
                counts[piece.step] = math.prod(piece.shape if kind is TokenKind.NUMBER else piece.shape[:-1])
        return {step: counts[step] for step in self.found.dump.steps if step in counts}

    def _read_term(self, term: SiteTerm, step: str, *, what: str) -> torch.Tensor:
        """Read a term of a site from one pass, its ranks' pieces put together."""
        directory = self.found.dump.directory
        pieces = term.of_pass(step).values()
        if not pieces:
            raise CaptureError(
                f"{directory} does not hold {what}",
                found=f"passes {', '.join(sorted(term.steps))}",
                next_step="Choose passes that hold the same modules (steps in a map), or capture again.",
            )
        tensors = [
            term.place.cut(read_tensor(directory / piece.file, piece.keys), what=f"{what}, {piece.file}")
            for piece in pieces
        ]
        if term.joins_heads:
            tensors = [tensor.flatten(-2) for tensor in tensors]
        rows = term.rows_in(step)
        if rows.are_divided:
            return torch.cat(tensors, dim=rows_dim(tuple(tensors[0].shape)))
        return rows.take(self._join_ranks(term, tensors, what=what))

    def _join_ranks(self, term: SiteTerm, tensors: list[torch.Tensor], *, what: str) -> torch.Tensor:
        """Put the pieces of ranks together that each have rows of all tokens."""
        if len(tensors) == 1:
            return tensors[0]
        # A layout that nobody declared is a guess by the site, which equal tensors on all ranks disprove.
        are_equal = all(are_equal_bits(tensors[0], tensor) for tensor in tensors[1:])
        layout = Replicated() if are_equal and not term.is_declared else term.layout
        try:
            return layout.assemble(tensors, what=f"{what} ({term.module} of {self.found.dump.directory})")
        except TargetError as error:
            raise CaptureError(
                error.what,
                expected=error.expected,
                found=error.found,
                next_step=f"It was taken to be {layout}: a map says otherwise, "
                "with @replicate, @shard(dim) or @partial behind the place.",
            ) from error


def _refuse_other_shapes(terms: Sequence[torch.Tensor], *, what: str) -> None:
    if any(term.shape != terms[0].shape for term in terms):
        raise CaptureError(
            f"{what} cannot be added up",
            expected="terms of one shape",
            found=", ".join(str(list(term.shape)) for term in terms),
            next_step="Correct the sum in the map.",
        )


def _weigh_chosen(affinities: torch.Tensor, chosen: torch.Tensor, *, what: str) -> torch.Tensor:
    """Return the weights [T,k] of the chosen experts [T,k] from the affinities [T,E], as fine as those."""
    if affinities.ndim == 0 or int(chosen.max()) >= affinities.shape[-1]:
        raise CaptureError(
            f"{what} cannot be computed from affinities",
            expected="affinities of all experts",
            found=f"{list(affinities.shape)}, and expert {int(chosen.max())} among the chosen ones",
            next_step="Say in a map where the weights of the chosen experts lie.",
        )
    weights = affinities.gather(-1, chosen.to(torch.int64)).to(torch.float32)
    weights = (weights / weights.sum(dim=-1, keepdim=True)).to(affinities.dtype)
    return weights.to(torch.float32)


def _flatten(tensor: torch.Tensor, kind: TokenKind, what: str) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Flatten each token's value into one last dim; return the tensor, and the shape of a value: (F,), (N, D) or ()."""
    if kind is TokenKind.CHANNELS:
        return tensor, tuple(tensor.shape[-1:])
    if kind is TokenKind.NUMBER:
        return tensor[..., None], ()
    if tensor.ndim == 4:  # [B,N,S,D]
        tensor = tensor.transpose(1, 2)
    elif tensor.ndim != 3:  # packed [T',N,D]
        raise CaptureError(
            f"{what} does not show its heads",
            expected="[B,heads,S,head_dim], or [tokens,heads,head_dim]",
            found=str(list(tensor.shape)),
            next_step="Bring its dims into that order with transpose in a map, or leave the site out.",
        )
    return tensor.flatten(-2), tuple(tensor.shape[-2:])


def _transpose(tensor: torch.Tensor, order: tuple[int, ...], *, what: str) -> torch.Tensor:
    if tensor.ndim != len(order):
        raise CaptureError(
            f"{what} cannot be transposed as the map says",
            expected=f"{len(order)} dims",
            found=str(list(tensor.shape)),
            next_step="Correct transpose in the map.",
        )
    return tensor.permute(order)
