"""Suggestions for a name that nobody knows: the known names that are spelled most alike."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    _Choice = click.Choice[Any]
else:  # older releases of click have no subscript here
    _Choice = click.Choice


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean …?` with up to three known names; an empty text if none is near."""
    near = get_close_matches(name.lower(), list(known))
    return f"Did you mean {' or '.join(near)}?" if near else ""


class NearChoice(_Choice):
    """A choice whose error suggests the values that are spelled most alike."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the choice.

        Raises:
            click.BadParameter: There is no such choice.
        """
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = did_you_mean(str(value), map(str, self.choices))
            if not near:
                raise
            message = f"{error.message.rstrip('.')}. {near}"
            raise click.BadParameter(message, ctx=ctx, param=param) from error
