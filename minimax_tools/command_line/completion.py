"""Shell completion of captures: the folders of one side under --captures, then any folder."""

from __future__ import annotations

from collections.abc import Callable

import click
from click.shell_completion import CompletionItem

from minimax_tools.capture.store import list_captures
from minimax_tools.command_line.options import captures_folder

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_captures(side: str) -> Completer:
    """Return a completer of an option that names a capture of a side; without a match the shell offers folders."""

    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = sorted(str(capture) for capture in list_captures(captures_folder(context) / side))
        matching = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return matching or [CompletionItem(incomplete, type="dir")]

    return complete
