"""FoundSites: the sites found in a dump, the pieces of each, and whose tokens the rows of a rank's tensor are.

| rows of a rank's tensor | tokens |
|---|---|
| P, the tokens of the pass with its padding | all of the pass |
| P / ranks | consecutive ones; the ranks' follow each other (sequence parallelism) |
| P · replicas | those of all data-parallel replicas, one replica after another |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from minimax_tools.dumps.piece import Dump, DumpPiece, SitePlace
from minimax_tools.dumps.placed_capture import SiteKey
from minimax_tools.dumps.schedule import PassRecord, Schedule
from minimax_tools.model.site_layouts import SiteLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """Rows of a rank's tensor in one pass."""

    are_divided: bool = False  # whether each rank has an equal part of the tokens, in rank order
    # First row of the pass's own tokens, and the row behind them, in a tensor with the tokens of all replicas.
    own: tuple[int, int] | None = None

    @classmethod
    def of(cls, shape: tuple[int, ...], record: PassRecord, *, num_ranks: int) -> RankRows:
        """Return the rows that a tensor of this shape has; all of the pass's where their number tells nothing else."""
        num_tokens = len(record.positions)
        num_rows = count_rows(shape)
        if num_ranks > 1 and num_rows * num_ranks == num_tokens:
            return cls(are_divided=True)
        replica, num_replicas = record.replica
        if num_replicas > 1 and num_rows == num_tokens * num_replicas:
            return cls(own=(replica * num_tokens, (replica + 1) * num_tokens))
        return cls()

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the pass's own rows of a tensor whose ranks' pieces are put together."""
        if self.own is None:
            return tensor
        start, stop = self.own
        return tensor.narrow(rows_dim(tuple(tensor.shape)), start, stop - start)


def rows_dim(shape: tuple[int, ...]) -> int:
    """Return the dim of the rows: 0 in [T,F] and [T,N,D], 1 in [1,T,F]."""
    return 1 if len(shape) > 2 and shape[0] == 1 else 0


def count_rows(shape: tuple[int, ...]) -> int:
    """Return the number of rows of [T,F], [T,N,D], [1,T,F] or [T]."""
    return shape[rows_dim(shape)] if shape else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTerm:
    """A tensor that a site is made of: the output or input of one module."""

    place: SitePlace  # the place, in a map's notation, that the module fits
    module: str  # the module's whole path
    # What each rank wrote in each pass, by label of the pass and rank.
    pieces: Mapping[tuple[str, int], DumpPiece]
    layout: SiteLayout  # how the ranks' pieces are put together
    is_declared: bool  # whether the map or the dump declares the layout; else the site's usual one is tried
    # Tokens that the ranks' rows are of, by label of the pass; in other passes each rank has all tokens.
    rank_rows: Mapping[str, RankRows] = field(default_factory=dict)
    joins_heads: bool = False  # whether heads and their channels are two dims, which are one in mm2's shape

    @property
    def steps(self) -> frozenset[str]:
        """Labels of the passes that hold the tensor."""
        return frozenset(step for step, _ in self.pieces)

    def rows_in(self, step: str) -> RankRows:
        """Return the tokens that the ranks' rows are of in one pass."""
        return self.rank_rows.get(step, RankRows())

    def count_rows(self, step: str) -> int:
        """Count the rows of the whole tensor in one pass; 0 if the pass does not hold it."""
        pieces = self.of_pass(step)
        if not pieces:
            return 0
        rows = self.rows_in(step)
        if rows.own is not None:
            return rows.own[1] - rows.own[0]
        num_rows = math.prod(next(iter(pieces.values())).shape[:-1])
        return num_rows * len(pieces) if rows.are_divided else num_rows

    def of_pass(self, step: str) -> dict[int, DumpPiece]:
        """Return the pieces of one pass, by rank."""
        return {rank: self.pieces[name, rank] for name, rank in sorted(self.pieces) if name == step}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSite:
    """A site found in a dump."""

    terms: tuple[SiteTerm, ...]  # tensors that are added up, most often one
    # Order of the dims that gives each term mm2's shape of the site; empty to leave it.
    transpose: tuple[int, ...] = ()
    # Whether the terms are affinities of all experts [T,E] and the chosen experts [T,k], which give their weights.
    is_of_affinities: bool = False
    # Whether each term is added to the sum of those before it, and that sum rounded; else all are added, then rounded.
    is_running_sum: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSites:
    """The sites found in a dump, and the passes, by label, to read them from."""

    dump: Dump
    sites: Mapping[SiteKey, FoundSite]  # every site found, by (layer, site); layer None outside the layers
    num_ranks: int  # ranks that the port was divided among
    # To read; those of an inner tuple (a group) follow each other for the same prompts.
    passes: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()  # sentences on how the dump is read, for the reader of a comparison
    left: tuple[str, ...] = ()  # passes that hold the same modules and are not read
    schedule: Schedule | None = None  # passes joined along the prompts; None to read them as `passes` says
    not_joined: str = ""  # reason why passes that record their requests cannot be joined; empty otherwise
    unmapped: tuple[str, ...] = ()  # modules that map to no site
    # What the layers' modules return first, by layer, where a format does not tell whether that is the whole output.
    layer_returns: Mapping[int, FoundSite] = field(default_factory=dict)

    def count_rows(self, steps: tuple[str, ...], num_tokens: int) -> dict[str, int]:
        """Count the rows of passes that follow each other, by a site whose rows add up to `num_tokens`.

        No rows are counted if those of no site do: padding, or tokens that no site has, may be among them.
        """
        counts = ({step: site.terms[0].count_rows(step) for step in steps} for site in self.sites.values())
        fitting = (of_site for of_site in counts if sum(of_site.values()) == num_tokens)
        return next(fitting, dict.fromkeys(steps, 0))
