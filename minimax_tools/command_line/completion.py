"""Shell completion of captures: the folders of one side under --captures, then any folder."""

from __future__ import annotations

from collections.abc import Callable

import click
from click.shell_completion import CompletionItem

from minimax_tools.capture.manifest import MANIFEST_NAME
from minimax_tools.command_line.options import captures_folder

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_captures(side: str) -> Completer:
    """Return a completer of an option that names a capture of a side; without a match the shell offers folders."""

    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        stored = sorted((captures_folder(context) / side).glob(f"*/{MANIFEST_NAME}"))
        names = [str(manifest.parent) for manifest in stored]
        matching = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return matching or [CompletionItem(incomplete, type="dir")]

    return complete
