"""`mm2-split`: checkpoints made and taken apart."""

from __future__ import annotations

import click

from minimax_tools.command_line.group import CommandPlace, Mm2Group


@click.group(cls=Mm2Group)
def mm2_split() -> None:
    """Make checkpoints, and take them apart."""


mm2_split.add_section(
    "Make a checkpoint",
    CommandPlace(
        "synthesize",
        "minimax_tools.commands.synthesize:synthesize_command",
        "Write a checkpoint in the hub's layout whose random numbers behave like a trained model's.",
    ),
)
mm2_split.add_section(
    "Divide a model",
    CommandPlace(
        "plan",
        "minimax_tools.commands.plan:plan_command",
        "Divide a model among machines, and print layers, bytes, memory and time of each.",
    ),
    CommandPlace(
        "fetch",
        "minimax_tools.commands.fetch:fetch_command",
        "Fetch the files that hold a node's tensors into the hub's cache.",
    ),
    CommandPlace(
        "extract",
        "minimax_tools.commands.extract:extract_command",
        "Cut nodes' slices out of a checkpoint, byte for byte, each into its own folder.",
    ),
    CommandPlace(
        "verify",
        "minimax_tools.commands.verify:verify_command",
        "Prove that each node loads its own slice, that the slices make up the model, and that no byte is wrong.",
    ),
)
mm2_split.add_section(
    "Look",
    CommandPlace(
        "memory",
        "minimax_tools.commands.memory:memory_command",
        "Print what a checkpoint takes: bytes by dtype, each layer and all of it in BF16 and in float32.",
    ),
    CommandPlace(
        "cache",
        "minimax_tools.commands.cache:cache_command",
        "List the goldens, runs and checkpoints that commands fetched from s3:// and hf:// addresses, with "
        "their sizes.",
    ),
)
