"""Tally: the checks of one promise, and those that broke it."""

from __future__ import annotations

from dataclasses import dataclass, field

# Longest description of a broken check that is printed.
_LONGEST = 400


@dataclass(slots=True, kw_only=True)
class Tally:
    """Checks of one promise; `broken` tells each that failed: what was done, what was expected, what was found."""

    promise: str
    num_checks: int = 0
    broken: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)  # what was measured beside, by name with its unit

    def check(self, holds: bool, description: str) -> None:
        """Count a check, and keep its description if it failed."""
        self.num_checks += 1
        if not holds:
            self.broken.append(description[:_LONGEST])
