"""The options by which several ranks share a layer, and what a command does on each of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from minimax_tools.command_line.console import end_command, given_arguments, show_warnings_only, speak_as
from minimax_tools.command_line.options import DTYPES, stack_options
from minimax_tools.errors import CannotRunError, UsageError
from minimax_tools.machine.native_output import native_output_dropped
from neuron.devices.backend import Backend, choose_backend
from neuron.devices.distributed import refuse_launched
from neuron.devices.rank_messages import RankFailedError
from neuron.devices.ranks import Ranks, read_ranks
from neuron.devices.runtime import open_runtime
from neuron.launch import launch_ranks
from neuron.runs.following import follow

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = stack_options(
    click.option(
        "--tp-degree",
        type=click.IntRange(min=1),
        metavar="T",
        help="Ranks that share a layer; started here, or by torchrun --nproc-per-node T -m neuron.",
    ),
    click.option(
        "--ep-degree",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="D",
        help="Groups of ranks that the experts are divided among; D divides T.",
    ),
    click.option(
        "--reduce-dtype",
        type=click.Choice(list(DTYPES)),
        default="float32",
        show_default=True,
        help="Dtype in which mm2's own layer adds up what ranks have a part of.",
    ),
)


def rank_options(command: Command) -> Command:
    """The options; the command itself runs on rank 0, and is given `ranks` in their place.

    Where ranks are asked for and none was launched, they are launched, and the command ends with the exit code of
    rank 0. The other ranks carry out what rank 0 tells them, and print nothing but errors.
    """

    @functools.wraps(command)
    def run_on_ranks(**options: Any) -> Any:
        # Before a look for the backend: importing torch_xla sets variables that would mislead the ranks.
        environment = dict(os.environ)
        ranks = _read(options)
        if not ranks.are_several or options.get("skip_compile"):
            return command(**options, ranks=ranks) if ranks.is_lead else None
        backend = choose_backend(options["backend"])
        refuse_launched(backend)
        is_launched = environment.get("WORLD_SIZE", "1") != "1"
        if backend is not Backend.XLA_CPU and not is_launched:
            end_command(launch_ranks(ranks.degree, given_arguments(), environment=environment))
        if ranks.is_lead:
            return command(**options, ranks=ranks)
        return _follow(options["backend"], ranks)

    decorated: Command = _OPTIONS(run_on_ranks)  # type: ignore[assignment]  # functools.wraps keeps its signature
    return decorated


def _read(options: dict[str, Any]) -> Ranks:
    """Take the options above out of a command's, and hold them against the ranks that were launched."""
    try:
        return read_ranks(
            options.pop("tp_degree"),
            ep_degree=options.pop("ep_degree"),
            reduce_dtype=DTYPES[options.pop("reduce_dtype")],
        )
    except UsageError as error:
        if os.environ.get("RANK", "0") != "0":
            # Rank 0 says the same.
            end_command(error.exit_code)
        raise


def _follow(backend: str, ranks: Ranks) -> None:
    """Do what rank 0 says until it says no more; what a port prints here would come between its results."""
    show_warnings_only()
    speak_as(f"rank {ranks.rank}")
    try:
        with native_output_dropped(), open_runtime(backend, ranks=ranks) as runtime:
            follow(runtime)
    except RankFailedError:
        # It says so itself.
        end_command(CannotRunError.exit_code)
