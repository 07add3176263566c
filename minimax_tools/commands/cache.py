"""`mm2-split cache`: what was fetched from remote addresses and is kept on this machine."""

from __future__ import annotations

import click

from minimax_tools.command_line.console import Mm2Command, print_json, print_text
from minimax_tools.command_line.options import output_options
from minimax_tools.json_codec import encode
from minimax_tools.machine.size import format_size
from minimax_tools.remote.cache import CACHE_VARIABLE, RemoteCache


@click.command("cache", cls=Mm2Command, epilog="\b\nExample: mm2-split cache --clear")
@click.option("--clear", "clears", is_flag=True, help="Remove everything that is listed.")
@output_options
def cache_command(clears: bool, as_json: bool) -> None:
    """List the goldens, runs and checkpoints that commands fetched from s3:// and hf:// addresses, with their sizes.

    MM2_CACHE names the folder; ~/.cache/mm2 is the default. What comes from a hub lies in huggingface_hub's cache, and
    is linked here. Do not clear it while a command reads from it.
    """
    cache = RemoteCache.from_environment()
    folders = cache.list()
    if clears:
        cache.clear()
    if as_json:
        record = {
            "directory": str(cache.folder),
            "cleared": clears,
            "folders": [encode(one) for one in folders],
        }
        print_json(record, next_commands=())
        return
    total = format_size(sum(one.size_bytes for one in folders))
    lines = [f"{cache.folder} ({CACHE_VARIABLE}): {total}{', cleared' if clears else ''}"]
    lines += [f"  {format_size(one.size_bytes):>9}  {one.kind:9} {one.path.name}" for one in folders]
    print_text("\n".join(lines), next_commands=())
