"""Diagnosed: a diagnosis in words, as Markdown and the page show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedMistake:
    """A known mistake that was tried on a place, and what it leaves of the error."""

    name: str
    parameters: str  # such as `theta 10000`; empty without any
    is_named: bool  # whether it explains the error; if not, it came nearest, which is a hint and no cause
    leaves: str  # ρ that is left with the mistake in the float32 layer
    explains: str  # percentage of the error's energy that it takes away
    what: str
    look_at: str
    layers: str = ""  # layers of the place that it was tried on; empty for all
    sources: tuple[str, ...] = ()  # public threads that report it
    proof: tuple[str, ...] = ()  # sentences on undoing it in the port; () if that was not asked for
    edits: tuple[str, ...] = ()  # lines that undo it in the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedPlace:
    """Layers that share a finding, or sites outside the layers."""

    place: str  # such as `layers 0-3`
    outcome: str  # such as `no known mistake explains them`, with ρ
    is_right: bool
    # Sentences on where the mistake lies, if nothing names it, and on the layers that are like these.
    lies: tuple[str, ...] = ()
    mistakes: tuple[TriedMistake, ...] = ()  # those that explain it, or came nearest: what leaves least first
    method: str = ""  # number of hypotheses that were tried, and what judged them
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedRun:
    """A whole diagnosis."""

    headline: str  # the verdict and the first wrong place, with its mistake
    places: tuple[DiagnosedPlace, ...]
    notes: tuple[str, ...] = ()
