"""Diagnosed: a diagnosis as the page shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedMistake:
    """A known mistake that was tried on a place, and what it leaves of the error."""

    name: str
    parameters: str  # such as `theta 10000`; empty without any
    is_named: bool  # whether it explains the error; if not, it came nearest
    leaves: float  # ρ that is left with the mistake in the float32 layer
    explains: float  # share of the error's energy that it takes away
    what: str
    look_at: str
    sources: tuple[str, ...] = ()  # public threads that report it
    proof: str = ""  # outcome of undoing it in the port, in words; empty if that was not asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedPlace:
    """A layer, or a site outside the layers, that was diagnosed."""

    place: str  # such as `layer 5`
    unexplained: float  # ρ without a mistake
    is_right: bool
    mistakes: tuple[TriedMistake, ...]  # those that explain it, or came nearest: what leaves least first
    num_hypotheses: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedRun:
    """A whole diagnosis."""

    places: tuple[DiagnosedPlace, ...]
    unexplained: tuple[str, ...] = ()  # places to blame that no mistake explains
    notes: tuple[str, ...] = ()
