"""`mm2-split`: checkpoints made and taken apart."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Group
from minimax_tools.commands.cache import cache_command
from minimax_tools.commands.extract import extract_command
from minimax_tools.commands.fetch import fetch_command
from minimax_tools.commands.memory import memory_command
from minimax_tools.commands.plan import plan_command
from minimax_tools.commands.synthesize import synthesize_command
from minimax_tools.commands.train import train_command
from minimax_tools.commands.verify import verify_command


@click.group(cls=Mm2Group)
def mm2_split() -> None:
    """Make checkpoints, and take them apart."""


mm2_split.add_section("Make a checkpoint", synthesize_command, train_command)
mm2_split.add_section("Divide a model", plan_command, fetch_command, extract_command, verify_command)
mm2_split.add_section("Look", memory_command, cache_command)
