"""`mm2-split fetch`: the files of a hub's model that one node needs."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from minimax_tools.command_line.console import Mm2Command, loading, print_json, print_text, say, shows_details
from minimax_tools.command_line.options import output_options
from minimax_tools.commands.options import plan_option
from minimax_tools.errors import format_count
from minimax_tools.machine.size import format_size
from minimax_tools.machine.streams import shows_pictures

if TYPE_CHECKING:
    from minimax_tools.partition.plan import PartitionPlan
    from minimax_tools.slices.source import SliceSource


@click.command("fetch", cls=Mm2Command, resumes=True)
@plan_option
@click.option("--node", required=True, metavar="NAME", help="Node whose slice is fetched.")
@click.option("--model", metavar="HUB_ID", help="Model on the hub. Default: the plan's.")
@output_options
def fetch_command(plan_file: Path, node: str, model: str | None, as_json: bool) -> None:
    """Fetch the files that hold a node's tensors into the hub's cache.

    With DEBUG=11, the download sections of mm2-split verify --verbose are printed too.

    Example: mm2-split fetch --plan plan.json --node a100
    """
    with loading():
        from minimax_tools.partition.plan import PartitionPlan
        from minimax_tools.slices.download import fetch_slice
        from minimax_tools.slices.source import open_source

    plan = PartitionPlan.read(plan_file)
    source = open_source(model or plan.model) if shows_details() else None
    if source is not None:
        model = source.model
        _show(plan, node, source, is_fetched=False)
    fetched = fetch_slice(plan, node, model=model)
    if source is not None:
        _show(plan, node, source, is_fetched=True)
    following = (shlex.join(("mm2-split", "verify", "--plan", str(plan_file), "--node", node)),)
    if as_json:
        record = {**asdict(fetched), "folder": str(fetched.folder), "files": list(fetched.files)}
        print_json(record, next_commands=following)
    else:
        content = f"{format_count(len(fetched.files), 'file')}, {format_size(fetched.size_bytes)}"
        print_text(f"{fetched.node}: {fetched.folder}, {content}", next_commands=following)


def _show(plan: PartitionPlan, node: str, source: SliceSource, *, is_fetched: bool) -> None:
    """Print the sections before the files are fetched, or the one after."""
    from minimax_tools.slices.download import Download, Repository
    from minimax_tools.slices.verification_text import render_completion, render_download

    slice_, with_marks = plan.slice_of(node), shows_pictures(sys.stderr)
    download = Download.of(slice_, source, Repository.of(source, plan))
    if is_fetched:
        text = render_completion(slice_, download.files, model=source.model, with_marks=with_marks)
    else:
        sizes = source.measure_tensors(plan)
        text = render_download(
            plan,
            slice_,
            download,
            model=source.model,
            slice_bytes=sum(sizes.get(name, 0) for name in slice_.names),
            with_marks=with_marks,
        )
    say(f"{text}\n", to_stderr=True)
