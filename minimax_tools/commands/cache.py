"""`mm2-split cache`: what was fetched from remote addresses and is kept on this machine."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Command, loading, print_json, print_text
from minimax_tools.command_line.options import output_options, parse_size_option
from minimax_tools.errors import UsageError
from minimax_tools.machine.size import format_size
from minimax_tools.machine.streams import align_columns
from minimax_tools.remote.cache import CACHE_VARIABLE, RemoteCache


@click.command("cache", cls=Mm2Command, epilog="\b\nExample: mm2-split cache --keep 200GB")
@click.option(
    "--keep",
    "keep_bytes",
    metavar="SIZE",
    callback=parse_size_option,
    help="Remove what was used least lately, until the cache takes at most SIZE, such as 200GB.",
)
@click.option("--clear", "clears", is_flag=True, help="Remove all.")
@output_options
def cache_command(keep_bytes: int | None, clears: bool, as_json: bool) -> None:
    """List the goldens, runs and checkpoints that commands fetched from s3:// and hf:// addresses, with their sizes.

    Nothing is removed unless you ask for it. MM2_CACHE names the folder; ~/.cache/mm2 is the default. What comes from
    a hub lies in huggingface_hub's cache, and is linked here. Remove nothing while a command reads from it.
    """
    with loading():
        from minimax_tools.capture.mirror import address_of
        from minimax_tools.json_codec import encode

    if clears and keep_bytes is not None:
        raise UsageError("--clear removes all, and --keep a part", next_step="Give one of them.")
    cache = RemoteCache.from_environment()
    folders = cache.list()
    named = {one.path: address_of(one.path) for one in folders}
    addresses = {path: None if name == str(path) else name for path, name in named.items()}
    removed = {one.path for one in cache.free(keep_bytes or 0)} if clears or keep_bytes is not None else set()
    if as_json:
        record = {
            "directory": str(cache.folder),
            "cleared": clears,
            "folders": [
                {**encode(one), "address": addresses[one.path], "removed": one.path in removed}
                for one in folders
            ],
        }
        print_json(record, next_commands=())
        return
    held_bytes = sum(one.size_bytes for one in folders if one.path not in removed)
    rows = [
        (
            format_size(one.size_bytes),
            one.kind,
            one.used_at.partition("T")[0],
            one.path.name,
            addresses[one.path] or "",
            "removed" if one.path in removed else "",
        )
        for one in folders
    ]
    lines = [f"{cache.folder} ({CACHE_VARIABLE}): {format_size(held_bytes)}"]
    if rows:
        titles = ("size", "kind", "used", "folder", "address", "")
        lines += [f"  {line}" for line in align_columns([titles, *rows], words=set(titles[1:]))]
    print_text("\n".join(lines), next_commands=())
