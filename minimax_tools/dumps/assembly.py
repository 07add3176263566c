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
from dataclasses import dataclass, field
from enum import Enum

import torch

from minimax_tools.dumps.found_sites import FoundSite, FoundSites, SiteTerm, rows_dim
from minimax_tools.dumps.schedule import TokenRows
from minimax_tools.dumps.tensor_file import read_tensor
from minimax_tools.errors import CaptureError, TargetError
from minimax_tools.model.site_layouts import Replicated, are_equal_bits

# Running sums kept of a pass: a layer's input, the stream behind its attention, and its output.
_NUM_SUMS = 3


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
        """Read a site's tokens, the places of which `rows` tells, one pass after the other: [T,F], [T,N,D] or [T]."""
        taken: dict[tuple[int, int], torch.Tensor] = {}
        for step in rows.steps:
            in_pass = f"{what} in pass {step}"
            tensor, token_shape = _flatten(self.read_pass(site, step, what=in_pass), kind, in_pass)
            try:
                places = rows.find(step, tuple(tensor.shape[:-1]), what=in_pass)
            except CaptureError as error:
                raise self._with_advice(error, site, rows, kind=kind) from error
            of_pass = tensor.flatten(0, -2)[places].reshape(len(places), *token_shape)
            stretches = rows.in_pass(step)
            parts = of_pass.split([stretch.length for _, stretch in stretches])
            taken |= {
                (prompt, stretch.start): part
                for (prompt, stretch), part in zip(stretches, parts, strict=True)
            }
        in_order = [taken[key] for key in sorted(taken)]  # by prompt, and by position in it
        self._refuse_other_widths((tuple(tokens.shape[1:]) for tokens in in_order), what=what)
        return torch.cat(in_order)

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

    def _with_advice(
        self, error: CaptureError, site: FoundSite, rows: TokenRows, *, kind: TokenKind
    ) -> CaptureError:
        """Return the error of a pass without the prompts' tokens, with the passes that have them as its next step."""
        if rows.padding is None or len(self.found.dump.steps) < 2:
            return error
        reason = f"The passes could not be joined: {self.found.not_joined} " if self.found.not_joined else ""
        chosen = choose_passes(self._count_rows(site, kind), rows.lengths)
        if chosen is None or chosen == self.found.passes:
            advice = "No steps of a map choose passes with these prompts: run both sides on the same ones."
        else:
            steps = ", ".join(f"[{', '.join(map(repr, group))}]" for group in chosen)
            advice = f"This line of a map (--map FILE) reads passes with as many tokens: steps: [{steps}]"
        return CaptureError(error.what, expected=error.expected, found=error.found, next_step=reason + advice)

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
