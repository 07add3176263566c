"""The sharing of a command among ranks: they are launched, rank 0 leads, and the others follow it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.console import (
    end_command,
    show_warnings_only,
    speak_as,
    take_afterwards,
)
from minimax_tools.command_line.given_line import given_arguments
from minimax_tools.errors import CannotRunError, UsageError
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.native_output import native_output_dropped
from minimax_tools.model.spec import ModelSpec
from minimax_tools.ranks.failure import RankFailedError
from minimax_tools.ranks.rank_place import RankPlace
from neuron.devices.backend import Backend
from neuron.devices.backend_choice import choose_backend
from neuron.devices.compiler import AUTO
from neuron.devices.distributed import refuse_launched
from neuron.devices.ranks import Ranks, read_ranks
from neuron.devices.runtime import Runtime, open_runtime
from neuron.launch import launch_ranks
from neuron.model_runs.model_executor import ModelAssignment, ModelExecutor
from neuron.model_runs.model_request import ModelSetup
from neuron.ports.targets import find_model_target, find_target
from neuron.runs.device_request import PortSetup
from neuron.runs.executor import Assignment, LayerExecutor
from neuron.weight_trace.shared_port import TraceAssignment, follow_trace


def run_on_ranks(command: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Run a command on rank 0 with `ranks` in place of the rank options, and follow it on the other ranks.

    If several ranks are asked for and none was launched, they are launched here, and the command ends with the exit
    code of rank 0. The other ranks follow rank 0's assignments, and print only warnings and errors.
    """
    # Before the backend is chosen: importing torch_xla sets variables that would mislead the ranks.
    environment = dict(os.environ)
    place = RankPlace.from_environment()
    ranks = _take_ranks(options, place)
    # With --skip-compile a saved run is only shown, by rank 0 alone.
    if not ranks.are_several or options.get("skip_compile"):
        return command(**options, ranks=ranks) if ranks.is_lead else None
    backend = choose_backend(options["backend"])
    refuse_launched(backend)  # xla-cpu under torchrun: its collectives are wrong
    # On xla-cpu, devices of this process stand for the ranks.
    if backend is not Backend.XLA_CPU and place.num_ranks == 1:
        # Rank 0 puts the run at its address.
        take_afterwards(click.get_current_context())
        end_command(launch_ranks(ranks.degree, given_arguments(), environment=environment))
    if ranks.is_lead:
        return command(**options, ranks=ranks)
    # Not all of these commands run layers alone, and compile them.
    return _follow_lead(options["backend"], options.get("compile_with", AUTO), ranks)


def _take_ranks(options: dict[str, Any], place: RankPlace) -> Ranks:
    """Remove the rank options from a command's options, and check them against the ranks that were launched."""
    try:
        return read_ranks(
            options.pop("tp_degree"),
            ep_degree=options.pop("ep_degree"),
            reduce_dtype=options.pop("reduce_dtype"),
        )
    except UsageError as error:
        if place.rank > 0:
            # Rank 0 reports the same error.
            end_command(error.exit_code)
        raise


def _follow_lead(backend: str, compile_with: str, ranks: Ranks) -> None:
    """Work for rank 0 until it sends no more. Drop the port's output, which would mix with the results."""
    show_warnings_only()
    speak_as(f"rank {ranks.rank}")
    try:
        with (
            native_output_dropped(),
            open_runtime(backend, compile_with=compile_with, ranks=ranks) as runtime,
        ):
            _run_assignments(runtime)
    except RankFailedError:
        # The failed rank reports it.
        end_command(CannotRunError.exit_code)


def _run_assignments(runtime: Runtime) -> None:
    """Carry out the lead's assignments, one after the other, until it sends None."""
    while (assignment := runtime.messages.receive()) is not None:
        if isinstance(assignment, TraceAssignment):
            follow_trace(assignment, runtime)
            continue
        if isinstance(assignment, ModelAssignment):
            _follow_model(assignment, runtime)
            continue
        assert isinstance(assignment, Assignment), "an assignment comes before its requests"
        setup = PortSetup(
            target=find_target(assignment.target),
            spec=ModelSpec.from_folder(assignment.folder),
            model_source=str(assignment.folder),
            dtype=assignment.dtype,
            inputs=assignment.inputs,
            # The lead's reads fill the page cache that all ranks share.
            prefetch=False,
            budget=MemoryBudget(assignment.budget_bytes),
            undone=assignment.undone,
        )
        with (
            # `range(0)` requires no shard here: the lead has checked them, and asks only for layers that are present.
            CheckpointReader(assignment.folder, layers=range(0)) as reader,
            LayerExecutor(setup, runtime=runtime, reader=reader) as executor,
        ):
            executor.follow()


def _follow_model(assignment: ModelAssignment, runtime: Runtime) -> None:
    """Run this rank's part of a whole port, until the lead's run of it ends."""
    setup = ModelSetup(
        target=find_model_target(assignment.target),
        spec=ModelSpec.from_folder(assignment.folder),
        folder=assignment.folder,
        dtype=assignment.dtype,
        sites=assignment.sites,
        budget=MemoryBudget(assignment.budget_bytes),
    )
    with CheckpointReader(assignment.folder) as reader:
        ModelExecutor(setup, batch=assignment.batch, runtime=runtime, reader=reader).follow()
