"""`mm2-split verify`: the proof that each node loads its own slice."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from minimax_tools.command_line.console import (
    DETAILED_LEVEL,
    Mm2Command,
    print_json,
    print_text,
    shows_details,
    shows_pictures,
)
from minimax_tools.command_line.options import output_options
from minimax_tools.commands.options import plan_model_option, plan_option
from minimax_tools.json_codec import encode
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.verification_text import render_details, render_summary
from minimax_tools.slices.verify import verify


@click.command("verify", cls=Mm2Command)
@plan_option
@click.option(
    "--node", "nodes", multiple=True, metavar="NAME", help="Node to verify. Repeat for several. Default: all."
)
@plan_model_option
@click.option(
    "--slices",
    type=click.Path(path_type=Path, file_okay=False),
    help="Parent folder of the slices. Every byte in it is compared with the checkpoint.",
)
@click.option(
    "--records",
    type=click.Path(path_type=Path, file_okay=False),
    help="Capture directory of a run, or its folder of read records. Verifies what each node read.",
)
@click.option("--verbose", is_flag=True, help=f"Show every section, as DEBUG={DETAILED_LEVEL} does.")
@output_options
@click.pass_context
def verify_command(
    context: click.Context,
    plan_file: Path,
    nodes: tuple[str, ...],
    model: str | None,
    slices: Path | None,
    records: Path | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Prove that each node loads its own slice, that the slices make up the model, and that no byte is wrong.

    Exits with 1 if a verdict fails.

    Example: mm2-split verify --plan plan.json --slices model_shards
    """
    plan = PartitionPlan.read(plan_file)
    verification = verify(plan, nodes=nodes, model=model, slices=slices, records=records)
    # With every section the output names the tensors and bytes that are wrong.
    following = () if verification.holds else (_with_all_sections(plan_file, nodes, model, slices, records),)
    if as_json:
        print_json(encode(verification), next_commands=following)
    else:
        render = render_details if verbose or shows_details() else render_summary
        print_text(render(verification, with_marks=shows_pictures(sys.stdout)), next_commands=following)
    if not verification.holds:
        context.exit(1)


def _with_all_sections(
    plan_file: Path, nodes: tuple[str, ...], model: str | None, slices: Path | None, records: Path | None
) -> str:
    """Return the command that verifies the same and shows every section, down to the wrong tensors."""
    given = {"--model": model, "--slices": slices, "--records": records}
    words = ["mm2-split", "verify", "--plan", str(plan_file)]
    words += [word for node in nodes for word in ("--node", node)]
    words += [word for option, value in given.items() if value is not None for word in (option, str(value))]
    return shlex.join((*words, "--verbose"))
