"""FoundSites: the sites found in a dump, and the pieces of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minimax_tools.dumps.piece import Dump, DumpPiece
from minimax_tools.dumps.place import SitePlace
from minimax_tools.dumps.placed_capture import SiteKey
from minimax_tools.dumps.schedule import Schedule
from minimax_tools.model.site_layouts import SiteLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTerm:
    """A tensor that a site is made of."""

    place: SitePlace
    module: str
    pieces: Mapping[tuple[str, int], DumpPiece]  # its pieces, by label of the pass and rank
    layout: SiteLayout  # how the ranks' pieces are put together
    is_declared: bool  # whether the map or the dump itself declares the layout

    @property
    def steps(self) -> frozenset[str]:
        """The passes that hold it."""
        return frozenset(step for step, _ in self.pieces)

    def of_pass(self, step: str) -> dict[int, DumpPiece]:
        """Return the pieces of one pass, by rank."""
        return {rank: self.pieces[name, rank] for name, rank in sorted(self.pieces) if name == step}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSite:
    """A site found in a dump.

    Args:
        terms: Tensors that are added up, most often one.
        transpose: Order of the dims that gives each term mm2's shape of the site; empty to leave it.
    """

    terms: tuple[SiteTerm, ...]
    transpose: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSites:
    """The sites found in a dump, and the passes to read them from.

    Args:
        sites: Every site found.
        num_ranks: Ranks that the port was divided among.
        passes: Passes to read; those of an inner tuple (a group) follow each other for the same prompts.
        notes: Sentences on how the dump is read, for the reader of a comparison.
        left: Passes that hold the same modules and are not read.
        schedule: The passes joined along the prompts; None if they are read as `passes` says.
        not_joined: Reason why recorded passes cannot be joined; empty otherwise.
        unmapped: Modules that map to no site.
    """

    dump: Dump
    sites: Mapping[SiteKey, FoundSite]
    num_ranks: int
    passes: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    schedule: Schedule | None = None
    not_joined: str = ""
    unmapped: tuple[str, ...] = ()
