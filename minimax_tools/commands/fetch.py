"""`mm2-split fetch`: what a node needs of a hub's model, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from minimax_tools.console import Mm2Command, print_json
from minimax_tools.errors import UsageError
from minimax_tools.options import output_options
from minimax_tools.partition.extract import DEFAULT_FOLDER
from minimax_tools.partition.fetch import FetchedSlice, fetch_slice, fetch_slice_ranges
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.progress import LayerProgress
from minimax_tools.size import word_size


@click.command("fetch", cls=Mm2Command)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="The plan: a file that mm2-split plan wrote.",
)
@click.option("--node", required=True, metavar="NAME", help="Whose slice.")
@click.option("--model", metavar="HUB_ID", help="The hub's model, where it is another than the plan's.")
@click.option(
    "--byte-ranges",
    is_flag=True,
    help="Fetch only the bytes of the slice's tensors, into a folder as mm2-split extract writes it.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"The slice's folder, with --byte-ranges. [default: ./{DEFAULT_FOLDER}/NODE]",
)
@output_options
def fetch_command(
    plan_file: Path, node: str, model: str | None, byte_ranges: bool, output: Path | None, as_json: bool
) -> None:
    """Fetch the files that hold a node's tensors into the hub's cache, or only the tensors' bytes.

    Example: mm2-split fetch --plan plan.json --node a100
    """
    if output is not None and not byte_ranges:
        raise UsageError(
            "--output needs --byte-ranges: whole files go to the hub's cache",
            next_step="Set HF_HOME to have the cache elsewhere.",
        )
    plan = PartitionPlan.read(plan_file)
    if byte_ranges:
        num_shards = len(plan.slice_of(node).files)
        with LayerProgress(num_shards, label=node, unit="file") as progress:
            fetched = fetch_slice_ranges(
                plan, node, output or DEFAULT_FOLDER / node, model=model, progress=progress
            )
    else:
        fetched = fetch_slice(plan, node, model=model)
    if as_json:
        print_json(_as_values(fetched))
    else:
        came = "" if fetched.bytes_fetched is None else f", {word_size(fetched.bytes_fetched)} fetched"
        size = word_size(fetched.size_bytes)
        click.echo(f"{fetched.node}: {fetched.folder}, {len(fetched.files)} files, {size}{came}")


def _as_values(fetched: FetchedSlice) -> dict[str, Any]:
    return {
        "node": fetched.node,
        "folder": str(fetched.folder),
        "files": list(fetched.files),
        "size_bytes": fetched.size_bytes,
        "bytes_fetched": fetched.bytes_fetched,
    }
