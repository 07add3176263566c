"""`mm2-split`: checkpoints made and taken apart."""

from __future__ import annotations

import click

from minimax_tools.command_line.group import Mm2Group


@click.group(cls=Mm2Group)
def mm2_split() -> None:
    """Make checkpoints, and take them apart."""


mm2_split.add_section("Make a checkpoint", "minimax_tools.commands", {"synthesize": "synthesize"})
mm2_split.add_section(
    "Divide a model",
    "minimax_tools.commands",
    {"plan": "plan", "fetch": "fetch", "extract": "extract", "verify": "verify"},
)
mm2_split.add_section("Look", "minimax_tools.commands", {"memory": "memory", "cache": "cache"})
