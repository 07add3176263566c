"""The distributed state of a run: its store, its process group, and Neuron's model-parallel groups.

A single rank has a process group too, because ports ask torch.distributed for their rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from minimax_tools.errors import BackendError, UsageError
from minimax_tools.machine.native_output import native_output_dropped
from minimax_tools.ranks.failure import attempt_store, connect_store, current_attempt, store_lost_error
from minimax_tools.ranks.rank_group import RankPlace
from neuron.devices.backend import Backend
from neuron.devices.ranks import Ranks

_OWN_PROCESS = "Start mm2-test in a process of its own."
# Longest wait for the other ranks within a layer: they load and compute as much as this one.
PATIENCE = timedelta(minutes=10)
# Longest wait for the lead at the start: it may first have to download the model.
_ARRIVAL_TIMEOUT = timedelta(hours=24)
_LEAD_KEY = "lead"


def open_store(ranks: Ranks) -> Any:
    """Connect to the key-value store that all ranks reach, and wait there for the lead.

    Keys have a prefix for each attempt: torchrun keeps its store when it starts the ranks anew.
    """
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {ranks.degree}, and the ranks cannot find each other",
            expected="the variables that torchrun sets",
            found=f"no {', '.join(missing)}",
            next_step=f"Start torchrun --nproc-per-node {ranks.degree} -m neuron …, or unset WORLD_SIZE.",
        )
    store = attempt_store(connect_store(_ARRIVAL_TIMEOUT), attempt=current_attempt())
    try:
        if ranks.is_lead:
            store.set(_LEAD_KEY, "here")
        else:
            store.wait([_LEAD_KEY], _ARRIVAL_TIMEOUT)
    except RuntimeError as error:
        raise store_lost_error(error) from error
    return store


@contextmanager
def process_group(
    backend: Backend, *, ranks: Ranks, store: Any = None, patience: timedelta = PATIENCE
) -> Iterator[None]:
    """Open the process group of these ranks for the block.

    Several ranks need the store that all of them reach; `patience` is the longest wait for them in a collective call.
    """
    if torch.distributed.is_initialized():
        raise BackendError("torch.distributed is initialised already", next_step=_OWN_PROCESS)
    with native_output_dropped():
        _open_group(backend, ranks, store, patience)
    try:
        _refuse_other_size("the process group", torch.distributed.get_world_size(), ranks.degree)
        yield
    finally:
        # A port may have destroyed the group itself.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@contextmanager
def model_parallel(tp_degree: int = 1) -> Iterator[Any]:
    """Open Neuron's model-parallel groups for the block, where neuronx-distributed is installed.

    The process group must be open.

    Yields:
        The tensor-parallel group, for `probe_group`; None without the package.
    """
    try:
        from neuronx_distributed.parallel_layers import parallel_state
    except ImportError:
        yield None
        return
    # neuronx-distributed itself accepts a second initialisation.
    if parallel_state.model_parallel_is_initialized():
        raise BackendError("parallel_state is initialised already", next_step=_OWN_PROCESS)
    try:
        # neuronx-distributed prints every group to standard output, where results belong.
        with native_output_dropped():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_degree)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise BackendError(
            f"parallel_state cannot be set up for a tensor-parallel size of {tp_degree}",
            found=str(error),
            next_step="Launch as many ranks as --tp-degree says.",
        ) from error
    try:
        # neuronx-distributed silently takes the number of all ranks if `tp_degree` is larger.
        found = parallel_state.get_tensor_model_parallel_size()
        _refuse_other_size("parallel_state", found, tp_degree)
        yield parallel_state.get_tensor_model_parallel_group()
    finally:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()


def probe_group(device: torch.device, *, group: Any = None) -> None:
    """Check a group, or the whole process group, by a known sum: some backends return wrong sums silently."""
    world_size = torch.distributed.get_world_size(group)
    # Rank r adds r + 1, so the sum is 1 + 2 + … + world_size.
    value = torch.full((4,), float(torch.distributed.get_rank(group) + 1), device=device)
    torch.distributed.all_reduce(value, group=group)
    expected = world_size * (world_size + 1) / 2
    found = value.cpu()
    if not torch.equal(found, torch.full((4,), expected)):
        raise BackendError(
            "the process group adds up wrongly",
            expected=f"{expected} on every rank",
            found=str(found.tolist()),
            next_step="Collectives on this backend cannot be trusted; run on one rank or with gloo.",
        )


def refuse_launched(backend: Backend) -> None:
    """Refuse several ranks that torchrun launched, on a backend whose collectives are wrong."""
    num_ranks = RankPlace.from_environment().num_ranks
    if num_ranks > 1 and backend is Backend.XLA_CPU:
        raise BackendError(
            f"mm2-test was launched with {num_ranks} ranks on {backend}",
            expected="one process",
            found=f"WORLD_SIZE={num_ranks}; collectives of XLA on the CPU are silently wrong",
            next_step="Start it without torchrun: --tp-degree divides a layer among devices within one process.",
        )


def _refuse_other_size(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise BackendError(
            f"{what} has another tensor-parallel size",
            expected=str(expected),
            found=str(found),
            next_step=_OWN_PROCESS,
        )


def _open_group(backend: Backend, ranks: Ranks, store: Any, patience: timedelta) -> None:
    try:
        if backend is Backend.NEURON_XLA:
            import torch_xla.distributed.xla_backend  # noqa: F401 - registers the backend "xla"

            torch.distributed.init_process_group("xla", init_method="xla://")
        else:
            torch.distributed.init_process_group(
                "neuron" if backend is Backend.NEURON else "gloo",
                store=store or torch.distributed.HashStore(),  # type: ignore[attr-defined]  # not in its __all__
                rank=ranks.rank,
                world_size=ranks.degree,
                timeout=patience,
            )
    except Exception as error:  # a foreign runtime: anything can come
        raise BackendError(
            f"no process group opens on {backend}",
            found=f"{type(error).__name__}: {error}",
            next_step="See --debug for the traceback.",
        ) from error
