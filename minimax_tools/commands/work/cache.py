"""`mm2-split cache` at work: cached folders listed and removed."""

from __future__ import annotations

from minimax_tools.capture.address_records import address_of
from minimax_tools.capture.remote_output import RemoteOutput
from minimax_tools.command_line.console import print_json, print_text
from minimax_tools.errors import UsageError
from minimax_tools.json_codec import encode
from minimax_tools.machine.size import format_size
from minimax_tools.machine.streams import align_columns
from minimax_tools.remote.cache import CACHE_VARIABLE, OUTPUT_RUN, OUTPUTS, CachedFolder, RemoteCache


def show_cache(keep_bytes: int | None, clears: bool, as_json: bool) -> None:
    """Free the cache as far as asked for, and print what it holds."""
    if clears and keep_bytes is not None:
        raise UsageError("--clear removes all, and --keep a part", next_step="Give one of them.")
    cache = RemoteCache.from_environment()
    folders = cache.list()
    addresses = {one.path: _address_of(one) for one in folders}
    states = {one.path: "" if one.is_copy else "not put there yet" for one in folders}
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
            "removed" if one.path in removed else states[one.path],
        )
        for one in folders
    ]
    lines = [f"{cache.folder} ({CACHE_VARIABLE}): {format_size(held_bytes)}"]
    if rows:
        titles = ("size", "kind", "used", "folder", "address", "")
        lines += [f"  {line}" for line in align_columns([titles, *rows], words=set(titles[1:]))]
    print_text("\n".join(lines), next_commands=())


def _address_of(folder: CachedFolder) -> str | None:
    """Return the address that a folder is of; None if it does not say."""
    if folder.kind == OUTPUTS:
        output = RemoteOutput.find(folder.path / OUTPUT_RUN)
        return None if output is None else str(output.address)
    address = address_of(folder.path)
    return None if address == str(folder.path) else address
