"""`mm2-split fetch`: the files or bytes of a hub's model that one node needs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minimax_tools.command_line.console import Mm2Command, loading, print_json, print_text, say, shows_details
from minimax_tools.command_line.options import output_options
from minimax_tools.commands.options import plan_option
from minimax_tools.errors import UsageError, format_count
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.machine.size import format_size
from minimax_tools.machine.streams import shows_pictures
from minimax_tools.slices.layout import DEFAULT_FOLDER

if TYPE_CHECKING:
    from minimax_tools.partition.plan import PartitionPlan, Slice
    from minimax_tools.slices.download import DownloadedFile
    from minimax_tools.slices.fetch import FetchedSlice
    from minimax_tools.slices.source import SliceSource


@click.command("fetch", cls=Mm2Command, resumes=True)
@plan_option
@click.option("--node", required=True, metavar="NAME", help="Node whose slice is fetched.")
@click.option("--model", metavar="HUB_ID", help="Model on the hub. Default: the plan's.")
@click.option(
    "--byte-ranges",
    is_flag=True,
    help="Fetch only the bytes of the slice's tensors, and write the slice as mm2-split extract does.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Folder of the slice, with --byte-ranges. Default: ./{DEFAULT_FOLDER}/NODE.",
)
@output_options
def fetch_command(
    plan_file: Path, node: str, model: str | None, byte_ranges: bool, output: Path | None, as_json: bool
) -> None:
    """Fetch the files that hold a node's tensors into the hub's cache, or only the tensors' bytes.

    With DEBUG=11, the download sections of mm2-split verify --verbose are printed too.

    Example: mm2-split fetch --plan plan.json --node a100
    """
    with loading():
        from minimax_tools.partition.plan import PartitionPlan
        from minimax_tools.slices.fetch import fetch_slice, fetch_slice_ranges
        from minimax_tools.slices.source import open_source

    if output is not None and not byte_ranges:
        raise UsageError(
            "--output needs --byte-ranges: whole files go to the hub's cache",
            next_step="Set HF_HOME to have the cache elsewhere.",
        )
    plan = PartitionPlan.read(plan_file)
    slice_ = plan.slice_of(node)
    source = open_source(model or plan.model) if shows_details() else None
    if source is not None:
        model = source.model
        _show_download(plan, slice_, source)
    if byte_ranges:
        with LayerProgress(len(slice_.files), label=node, unit="file") as progress:
            fetched = fetch_slice_ranges(
                plan, node, output or DEFAULT_FOLDER / node, model=model, progress=progress
            )
    else:
        fetched = fetch_slice(plan, node, model=model)
    if source is not None:
        _show_completion(plan, slice_, source, fetched)
    places = ("--slices", str(fetched.folder.parent)) if byte_ranges and fetched.folder.name == node else ()
    following = (shlex.join(("mm2-split", "verify", "--plan", str(plan_file), "--node", node, *places)),)
    if as_json:
        print_json(_as_values(fetched), next_commands=following)
    else:
        received = "" if fetched.bytes_fetched is None else f", {format_size(fetched.bytes_fetched)} fetched"
        content = f"{format_count(len(fetched.files), 'file')}, {format_size(fetched.size_bytes)}"
        print_text(f"{fetched.node}: {fetched.folder}, {content}{received}", next_commands=following)


def _show_download(plan: PartitionPlan, slice_: Slice, source: SliceSource) -> None:
    from minimax_tools.slices.download import Download, Repository
    from minimax_tools.slices.verification_text import render_download

    sizes = source.measure_tensors(plan)
    text = render_download(
        plan,
        slice_,
        Download.of(slice_, source, Repository.of(source, plan)),
        model=source.model,
        slice_bytes=sum(sizes.get(name, 0) for name in slice_.names),
        with_marks=shows_pictures(sys.stderr),
    )
    say(f"{text}\n", to_stderr=True)


def _show_completion(plan: PartitionPlan, slice_: Slice, source: SliceSource, fetched: FetchedSlice) -> None:
    from minimax_tools.slices.download import Download, Repository
    from minimax_tools.slices.verification_text import render_completion

    if fetched.bytes_fetched is None:  # whole files
        files = Download.of(slice_, source, Repository.of(source, plan)).files
    else:
        files = tuple(_measure_files(fetched, source.measure_tensors(plan)))
    text = render_completion(slice_, files, model=source.model, with_marks=shows_pictures(sys.stderr))
    say(f"{text}\n", to_stderr=True)


def _measure_files(fetched: FetchedSlice, sizes: Mapping[str, int]) -> Iterator[DownloadedFile]:
    """Yield the files of a slice fetched by byte ranges, with the bytes of their tensors in the source and here.

    `sizes` has each tensor's bytes in the source. A tensor that it lacks counts as right.
    """
    from minimax_tools.slices.download import DownloadedFile
    from minimax_tools.slices.folder import read_slice_folder

    entries = tuple(read_slice_folder(fetched.folder).entries.values())
    for file in fetched.files:
        tensors = [entry for entry in entries if entry.file.name == file]
        yield DownloadedFile(
            name=file,
            expected_bytes=sum(sizes.get(entry.name, entry.size_bytes) for entry in tensors),
            actual_bytes=sum(entry.size_bytes for entry in tensors),
        )


def _as_values(fetched: FetchedSlice) -> dict[str, Any]:
    return {
        "node": fetched.node,
        "folder": str(fetched.folder),
        "files": list(fetched.files),
        "size_bytes": fetched.size_bytes,
        "bytes_fetched": fetched.bytes_fetched,
    }
