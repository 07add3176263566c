"""Certificate: the checks that a golden went through before it is trusted; a part of its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimax_tools.json_codec import encode_fields
from minimax_tools.text_enum import TextEnum


class Outcome(TextEnum):
    """Result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check of a golden.

    Args:
        name: Its name, such as `rotary_width`.
        found: The finding in words, or the reason why there is none.
        figure: The worst figure measured, if there is one.
        limit: The largest figure that passes.
    """

    name: str
    outcome: Outcome
    found: str
    figure: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The checks of a golden.

    Args:
        checks: Every check, including those that could not be made.
        content: Digest of the manifest's contents, to which the certificate belongs.
        files: sha256 of every tensor file beside the manifest.
        versions: Versions of the libraries that checked.
    """

    checks: tuple[Check, ...]
    content: str
    files: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_passed(self) -> bool:
        """True if no check failed; some may not have been made."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.outcome is Outcome.FAILED)

    @property
    def not_checked(self) -> tuple[Check, ...]:
        """The checks that could not be made."""
        return tuple(check for check in self.checks if check.outcome is Outcome.NOT_CHECKED)

    def __str__(self) -> str:
        num_passed = sum(check.outcome is Outcome.PASSED for check in self.checks)
        parts = [f"{num_passed} of {len(self.checks)} checks passed"]
        if self.failed:
            parts.append(f"failed: {_names(self.failed)}")
        if self.not_checked:
            parts.append(f"not checked: {_names(self.not_checked)}")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as a manifest holds it."""
        return {"passed": self.has_passed, **encode_fields(self)}


def _names(checks: tuple[Check, ...]) -> str:
    return ", ".join(check.name for check in checks)
