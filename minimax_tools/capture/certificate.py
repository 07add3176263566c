"""Certificate: the checks that a golden went through before it is trusted; a part of its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimax_tools.json_codec import decode_fields, encode_fields
from minimax_tools.text_enum import TextEnum


class Outcome(TextEnum):
    """Result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check of a golden."""

    name: str  # such as `rotary_width`
    outcome: Outcome
    found: str  # the finding in words, or the reason why the check could not be made
    # The worst value measured; None if the check measures nothing, or the value is not finite
    worst: float | None = None
    limit: float | None = None  # the largest value that passes; None if the check measures nothing

    def to_json(self) -> dict[str, Any]:
        """Return the check as a manifest holds it: with `worst` under the key `figure`."""
        return encode_fields(self, worst="figure")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Check:
        """Return the check that a manifest holds."""
        return decode_fields(cls, record, worst="figure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The checks of a golden."""

    checks: tuple[Check, ...]  # every check, including those that could not be made
    content_digest: str  # `Manifest.content_digest` of the capture that was checked
    files: Mapping[str, str] = field(default_factory=dict)  # sha256 of every tensor file, by file name
    versions: Mapping[str, str] = field(default_factory=dict)  # of the libraries that checked, by library

    @property
    def has_passed(self) -> bool:
        """True if no check failed; some may not have been made."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return self._with_outcome(Outcome.FAILED)

    @property
    def not_checked(self) -> tuple[Check, ...]:
        """The checks that could not be made."""
        return self._with_outcome(Outcome.NOT_CHECKED)

    def __str__(self) -> str:
        num_passed = len(self._with_outcome(Outcome.PASSED))
        parts = [f"{num_passed} of {len(self.checks)} checks passed"]
        for label, checks in (("failed", self.failed), ("not checked", self.not_checked)):
            if checks:
                parts.append(f"{label}: {', '.join(check.name for check in checks)}")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as a manifest holds it."""
        return {"passed": self.has_passed, **encode_fields(self, content_digest="content")}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Certificate:
        """Return the certificate that a manifest holds."""
        return decode_fields(cls, record, content_digest="content")

    def _with_outcome(self, outcome: Outcome) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome is outcome)
