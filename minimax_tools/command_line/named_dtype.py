"""NamedDtype: the dtype that an option names. torch, which has it, is loaded when the command runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from minimax_tools.command_line.late_value import LateValue

if TYPE_CHECKING:
    import torch

# Dtypes that weights and activations are computed in.
DTYPE_NAMES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class NamedDtype(LateValue):
    """A dtype by torch's name of it."""

    name: str

    @classmethod
    def read(cls, _: click.Context, __: click.Parameter, name: str) -> NamedDtype:
        """Return the dtype that an option names (a click callback)."""
        return cls(name)

    def find(self, ctx: click.Context) -> torch.dtype:
        """Return the dtype."""
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype
