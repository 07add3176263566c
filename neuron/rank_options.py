"""The options by which several ranks share a layer; `rank_sharing` runs a command on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from minimax_tools.command_line.options import DTYPE_NAMES, NamedDtype, stack_options
from minimax_tools.command_line.work import Work, add_work

Command = TypeVar("Command", bound=Callable[..., Any])

_SHARING = Work("neuron.rank_sharing", "run_on_ranks")
_OPTIONS = stack_options(
    click.option(
        "--tp-degree",
        type=click.IntRange(min=1),
        metavar="T",
        help="Number of ranks that share a layer. mm2-test starts them, or torchrun --nproc-per-node T -m neuron.  "
        "[default: the ranks that torchrun started, else 1]",
    ),
    click.option(
        "--ep-degree",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="D",
        help="Number of groups of ranks that the experts are divided among; must divide T.",
    ),
    click.option(
        "--reduce-dtype",
        type=click.Choice(DTYPE_NAMES),
        default="float32",
        show_default=True,
        callback=NamedDtype.read,
        help="Dtype in which mm2's own layer adds up the partial sums of the ranks.",
    ),
)


def rank_options(command: Command) -> Command:
    """Add the options to a command, which then runs on rank 0 and takes `ranks` in their place."""

    @functools.wraps(command)
    def run(**options: Any) -> Any:
        return _SHARING.load()(command, options)

    add_work(run, _SHARING)
    decorated: Command = _OPTIONS(run)  # type: ignore[assignment]  # functools.wraps keeps its signature
    return decorated
