"""Checks that many things must pass, collected one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from minimax_tools.capture.certificate import Check, Outcome


@dataclass(slots=True, kw_only=True)
class Tally:
    """A check that counts: every item holds or is a fault.

    Args:
        missing: Why it did not run, if no item came.
        count: Items so far.
        faults: Faults so far, in words.
    """

    name: str
    missing: str
    count: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, fault: str | None) -> None:
        """Add an item, with its fault in words; None if it holds."""
        self.count += 1
        if fault is not None:
            self.faults.append(fault)

    def check(self, told: str) -> Check:
        """Return the check; `told` is its claim if all items hold."""
        if not (self.faults or self.count):
            return Check(name=self.name, outcome=Outcome.NOT_CHECKED, found=self.missing)
        found = _listed(self.faults) if self.faults else f"{told} ({self.count})"
        return claim(self.name, is_right=not self.faults, found=found)


@dataclass(slots=True, kw_only=True)
class Worst:
    """A check that keeps the worst figure so far, relative to its limit.

    Args:
        missing: Why it did not run, if no figure came.
        where: Its place, in words.
    """

    name: str
    missing: str
    figure: float | None = None
    limit: float | None = None
    where: str = ""

    def take(self, figure: float, limit: float, where: str) -> None:
        """Add a figure; NaN is worse than any number."""
        if (
            self.figure is None
            or self.limit is None
            or _excess(figure, limit) > _excess(self.figure, self.limit)
        ):
            self.figure, self.limit, self.where = figure, limit, where

    def check(self, told: str) -> Check:
        """Return the check; `told` names the figure."""
        if self.figure is None or self.limit is None:
            return Check(name=self.name, outcome=Outcome.NOT_CHECKED, found=self.missing)
        found = f"{told} by at most {self.figure:.2g}, at {self.where}; allowed {self.limit:.2g}"
        check = claim(self.name, is_right=self.figure <= self.limit, found=found)
        # JSON has no infinity and no NaN.
        figure = self.figure if math.isfinite(self.figure) else None
        return replace(check, worst=figure, limit=self.limit)


def claim(name: str, *, is_right: bool, found: str) -> Check:
    """Return the check of one thing that holds or does not."""
    return Check(name=name, outcome=Outcome.PASSED if is_right else Outcome.FAILED, found=found)


def _excess(figure: float, limit: float) -> float:
    return math.inf if math.isnan(figure) else figure / limit


def _listed(faults: list[str]) -> str:
    return "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if faults[3:] else "")
