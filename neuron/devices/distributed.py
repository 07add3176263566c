"""Distributed state: the process group of a run, and Neuron's model-parallel groups, set up and torn down.

Ports ask torch.distributed for their rank even when they run alone, so a group of one is always there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from minimax_tools.errors import BackendError
from minimax_tools.machine.native_output import native_output_dropped
from neuron.devices.backend import Backend
from neuron.devices.ranks import Ranks

_OWN_PROCESS = "Start mm2-test in a process of its own."
# How long a rank waits for the others within a layer: they load as much, and compute as much.
PATIENCE = timedelta(minutes=10)


@contextmanager
def process_group(
    backend: Backend, *, ranks: Ranks, store: Any = None, patience: timedelta = PATIENCE
) -> Iterator[None]:
    """Hold a process group of these ranks for the time of the block.

    Args:
        backend: What computes.
        ranks: All that were launched.
        store: torch.distributed's, which all of them reach; none for one rank.
        patience: How long a rank waits for the others in a collective call.

    Raises:
        BackendError: A group is up already, cannot be opened, or has another size than was asked for.
    """
    if torch.distributed.is_initialized():
        raise BackendError("torch.distributed is initialised already", next_step=_OWN_PROCESS)
    with native_output_dropped():
        _open_group(backend, ranks, store, patience)
    try:
        _refuse_other_size("the process group", torch.distributed.get_world_size(), ranks.degree)
        yield
    finally:
        # A port may have taken it down itself.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@contextmanager
def model_parallel(tp_degree: int = 1) -> Iterator[Any]:
    """Hold Neuron's model-parallel groups, of that size, where neuronx-distributed is installed.

    The process group is up.

    Yields:
        The tensor-parallel group, to be probed; None where the package is absent.

    Raises:
        BackendError: They are up already, have another size than was asked for, or cannot be set up.
    """
    try:
        from neuronx_distributed.parallel_layers import parallel_state
    except ImportError:
        yield None
        return
    # A second initialisation does not raise there, so it is asked for here.
    if parallel_state.model_parallel_is_initialized():
        raise BackendError("parallel_state is initialised already", next_step=_OWN_PROCESS)
    try:
        # It tells of every group it makes, where results belong.
        with native_output_dropped():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_degree)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise BackendError(
            f"parallel_state cannot be set up for a tensor-parallel size of {tp_degree}",
            found=str(error),
            next_step="Launch as many ranks as --tp-degree says.",
        ) from error
    try:
        # The size asked for is clamped to the world silently.
        found = parallel_state.get_tensor_model_parallel_size()
        _refuse_other_size("parallel_state", found, tp_degree)
        yield parallel_state.get_tensor_model_parallel_group()
    finally:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()


def probe_group(device: torch.device, *, group: Any = None) -> None:
    """Check a group with a sum whose answer is known: some backends return wrong sums without a word.

    Args:
        device: Where the sum is computed.
        group: The group; None for the whole one.

    Raises:
        BackendError: The answer is wrong.
    """
    world_size = torch.distributed.get_world_size(group)
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
    """Refuse a backend whose collectives cannot be trusted where torchrun launched several ranks.

    Raises:
        BackendError: It did, and the backend is XLA on the CPU.
    """
    world_size = os.environ.get("WORLD_SIZE") or "1"
    if world_size != "1" and backend is Backend.XLA_CPU:
        raise BackendError(
            f"mm2-test was launched with {world_size} ranks on {backend}",
            expected="one process",
            found=f"WORLD_SIZE={world_size}; collectives of XLA on the CPU are silently wrong",
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
