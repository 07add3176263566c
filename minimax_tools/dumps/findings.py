"""Findings: which of a dump's pieces belong to which site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from minimax_tools.dumps.piece import DumpPiece
from minimax_tools.dumps.place import SitePlace
from minimax_tools.dumps.schedule import Schedule
from minimax_tools.model.site_layouts import SiteLayout
from minimax_tools.model.sites import ModelSite, Site

# A site of a layer, or of the model where the layer is None.
Key = tuple[int | None, Site | ModelSite | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One tensor that a site is made of.

    Args:
        place: Where it lies.
        module: The module that is meant.
        pieces: Its pieces, by pass and rank.
        layout: How the ranks' pieces make it up.
        is_declared: Whether the layout was declared, by the map or by the dump itself.
    """

    place: SitePlace
    module: str
    pieces: Mapping[tuple[str, int], DumpPiece]
    layout: SiteLayout
    is_declared: bool

    @property
    def steps(self) -> frozenset[str]:
        """The passes that hold it."""
        return frozenset(step for step, _ in self.pieces)

    def of_pass(self, step: str) -> dict[int, DumpPiece]:
        """The pieces of one pass, by rank."""
        return {rank: self.pieces[name, rank] for name, rank in sorted(self.pieces) if name == step}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where one site lies in a dump.

    Args:
        terms: What is added up, most often one.
        transpose: Order of the dims that makes of each term the shape that mm2 gives the site.
    """

    terms: tuple[Term, ...]
    transpose: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a dump holds, in mm2's words.

    Args:
        sites: Where each site lies.
        num_ranks: Ranks that the port was divided among.
        passes: Passes that are read, those of an inner tuple for the same prompts.
        left: Passes that are not, though they hold the same modules.
        notes: What a reader of a comparison must know.
        schedule: How the passes are joined along the prompts; None where they are read as `passes` says.
        not_joined: Why they are not joined though the tool tells of them; empty otherwise.
        unmapped: Modules that map to no site.
    """

    sites: Mapping[Key, Found]
    num_ranks: int
    passes: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    left: tuple[str, ...] = ()
    schedule: Schedule | None = None
    not_joined: str = ""
    unmapped: tuple[str, ...] = field(default=())
