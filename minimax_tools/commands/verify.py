"""`mm2-split verify`: the proof that each node loads its own slice."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from minimax_tools.command_line.console import (
    DETAILED_LEVEL,
    Mm2Command,
    end_command,
    loading,
    print_json,
    print_text,
    say,
    shows_details,
)
from minimax_tools.command_line.options import output_options
from minimax_tools.commands.options import newest_plan_option, plan_model_option
from minimax_tools.errors import UsageError, list_names
from minimax_tools.machine.streams import shows_pictures
from minimax_tools.slices.description import DEFAULT_FOLDER

# Nodes that a message names.
_MAX_NAMED = 8


@click.command("verify", cls=Mm2Command)
@newest_plan_option
@click.option(
    "--node", "nodes", multiple=True, metavar="NAME", help="Node to verify. Repeat for several. Default: all."
)
@plan_model_option
@click.option(
    "--slices",
    type=click.Path(path_type=Path, file_okay=False),
    help="Parent folder of the slices. Every byte in it is compared with the checkpoint. Default: none; without --plan "
    f"./{DEFAULT_FOLDER}, if it is there.",
)
@click.option(
    "--records",
    type=click.Path(path_type=Path, file_okay=False),
    help="Capture directory of a run, or its folder of read records. Verifies what each node read.",
)
@click.option("--verbose", is_flag=True, help=f"Show every section, as DEBUG={DETAILED_LEVEL} does.")
@output_options
def verify_command(
    plan_file: Path | None,
    nodes: tuple[str, ...],
    model: str | None,
    slices: Path | None,
    records: Path | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Prove that each node loads its own slice, that the slices make up the model, and that no byte is wrong.

    Exits with 1 if a verdict fails. Without --plan, the newest plan in this folder is verified, and of the nodes those
    that have a slice here.

    Example: mm2-split verify --plan plan.json --slices model_shards
    """
    with loading():
        from minimax_tools.json_codec import encode
        from minimax_tools.partition.plan import PartitionPlan
        from minimax_tools.slices.verification_text import render_details, render_summary
        from minimax_tools.slices.verify import verify

    is_named = plan_file is not None
    plan_file = plan_file or _find_newest_plan(Path())
    plan = PartitionPlan.read(plan_file)
    if not is_named:
        if slices is None and DEFAULT_FOLDER.is_dir():
            slices = DEFAULT_FOLDER
        if not nodes and slices is not None:
            names = (slice_.node.name for slice_ in plan.slices)
            nodes = tuple(name for name in names if (slices / name).is_dir())
        of_nodes = f", slices of {list_names(list(nodes), most=_MAX_NAMED)} in {slices}" if nodes else ""
        say(f"Newest plan here: {plan_file}{of_nodes}", to_stderr=True)
    verification = verify(plan, nodes=nodes, model=model, slices=slices, records=records)
    # With every section the output names the tensors and bytes that are wrong.
    following = () if verification.holds else (_with_all_sections(plan_file, nodes, model, slices, records),)
    if as_json:
        print_json(encode(verification), next_commands=following)
    else:
        render = render_details if verbose or shows_details() else render_summary
        print_text(render(verification, with_marks=shows_pictures(sys.stdout)), next_commands=following)
    if not verification.holds:
        end_command(1)


def _find_newest_plan(folder: Path) -> Path:
    """Return the plan in a folder that was written last.

    Raises:
        UsageError: There is none.
    """
    from minimax_tools.partition.plan import PartitionPlan

    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            PartitionPlan.read(path)
        except UsageError:
            continue  # another JSON file
        return path
    raise UsageError(
        "there is no plan in this folder",
        expected="a JSON file that mm2-split plan wrote",
        next_step="Name one with --plan, or make one: mm2-split plan --output plan.json.",
    )


def _with_all_sections(
    plan_file: Path, nodes: tuple[str, ...], model: str | None, slices: Path | None, records: Path | None
) -> str:
    """Return the command that verifies the same and shows every section, down to the wrong tensors."""
    given = {"--model": model, "--slices": slices, "--records": records}
    words = ["mm2-split", "verify", "--plan", str(plan_file)]
    words += [word for node in nodes for word in ("--node", node)]
    words += [word for option, value in given.items() if value is not None for word in (option, str(value))]
    return shlex.join((*words, "--verbose"))
