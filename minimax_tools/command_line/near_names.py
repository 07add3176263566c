"""NearChoice: a choice among names whose error suggests the names that are spelled most alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from minimax_tools.errors import did_you_mean

if TYPE_CHECKING:
    _Choice = click.Choice[Any]
else:  # older releases of click have no subscript here
    _Choice = click.Choice


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
