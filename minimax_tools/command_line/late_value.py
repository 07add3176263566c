"""LateValue: the value of an option that is found when the command runs: a server is asked for it, or torch has it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import click


class LateValue(ABC):
    """The value of an option that is found when the command runs."""

    @abstractmethod
    def find(self, ctx: click.Context) -> Any:
        """Return the value that the command gets."""


def find_late_values(ctx: click.Context) -> None:
    """Give the command that is about to run its late values."""
    for name, value in ctx.params.items():
        ctx.params[name] = value.find(ctx) if isinstance(value, LateValue) else value
