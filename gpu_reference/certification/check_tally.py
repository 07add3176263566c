"""Checks over many items, which are added one by one: `Tally` counts faults, `Worst` keeps the worst figure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from minimax_tools.capture.manifest import Check, Outcome


@dataclass(slots=True, kw_only=True)
class Tally:
    """A check that passes if no item has a fault."""

    name: str
    missing: str  # reason why the check did not run, if no item comes
    count: int = 0
    faults: list[str] = field(default_factory=list)  # faults so far, in words

    def add(self, *faults: str) -> None:
        """Add an item with its faults in words; without faults the item is right."""
        self.count += 1
        self.faults += faults

    def check(self, statement: str) -> Check:
        """Return the check; `statement` says what holds if no item has a fault."""
        if not (self.faults or self.count):
            return Check(name=self.name, outcome=Outcome.NOT_CHECKED, found=self.missing)
        found = _list_faults(self.faults) if self.faults else f"{statement} ({self.count})"
        return claim(self.name, is_right=not self.faults, found=found)


@dataclass(slots=True, kw_only=True)
class Worst:
    """A check that passes if the worst figure is within its limit; figures are compared relative to their limits."""

    name: str
    missing: str  # reason why the check did not run, if no figure comes
    figure: float | None = None  # worst figure so far; `limit` is its limit, and `where` its place in words
    limit: float | None = None
    where: str = ""

    def add(self, figure: float, limit: float, where: str) -> None:
        """Add a figure; NaN is worse than any number."""
        excess_before = -math.inf
        if self.figure is not None and self.limit is not None:
            excess_before = _excess(self.figure, self.limit)
        if _excess(figure, limit) > excess_before:
            self.figure, self.limit, self.where = figure, limit, where

    def check(self, statement: str) -> Check:
        """Return the check; `statement` says what the figure measures."""
        if self.figure is None or self.limit is None:
            return Check(name=self.name, outcome=Outcome.NOT_CHECKED, found=self.missing)
        found = f"{statement} by at most {self.figure:.2g}, at {self.where}; allowed {self.limit:.2g}"
        check = claim(self.name, is_right=self.figure <= self.limit, found=found)
        # The manifest is JSON, which has no infinity and no NaN.
        figure = self.figure if math.isfinite(self.figure) else None
        return replace(check, worst=figure, limit=self.limit)


def claim(name: str, *, is_right: bool, found: str) -> Check:
    """Return the check of one thing that holds or does not."""
    return Check(name=name, outcome=Outcome.PASSED if is_right else Outcome.FAILED, found=found)


def _excess(figure: float, limit: float) -> float:
    return math.inf if math.isnan(figure) else figure / limit


def _list_faults(faults: list[str]) -> str:
    return "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if faults[3:] else "")
