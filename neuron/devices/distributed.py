"""Distributed state: a process group for the port, and Neuron's model-parallel groups, set up and torn down.

Ports ask torch.distributed for their rank even when they run alone, so a group of one is always there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed

from minimax_tools.errors import BackendError
from minimax_tools.native_output import native_output_dropped
from neuron.devices.backend import Backend

_OWN_PROCESS = "Start mm2-test in a process of its own."


@contextmanager
def process_group(backend: Backend) -> Iterator[None]:
    """Hold a process group of one rank for the time of the block.

    Raises:
        BackendError: Several ranks were launched, a group is up already, or it cannot be opened.
    """
    _refuse_several_ranks(backend)
    if torch.distributed.is_initialized():
        raise BackendError("torch.distributed is initialised already", next_step=_OWN_PROCESS)
    with native_output_dropped():
        _open_group(backend)
    try:
        yield
    finally:
        # A port may have taken it down itself.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@contextmanager
def model_parallel() -> Iterator[None]:
    """Hold Neuron's model-parallel groups, of size one, where neuronx-distributed is installed.

    Raises:
        BackendError: They are up already, or have another size than was asked for.
    """
    try:
        from neuronx_distributed.parallel_layers import parallel_state
    except ImportError:
        yield
        return
    # A second initialisation does not raise there, so it is asked for here.
    if parallel_state.model_parallel_is_initialized():
        raise BackendError("parallel_state is initialised already", next_step=_OWN_PROCESS)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    try:
        # The size asked for is clamped to the world silently.
        found = parallel_state.get_tensor_model_parallel_size()
        if found != 1:
            raise BackendError(
                "parallel_state has another tensor-parallel size",
                expected="1",
                found=str(found),
                next_step=_OWN_PROCESS,
            )
        yield
    finally:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()


def probe_group(device: torch.device) -> None:
    """Check the group with a sum whose answer is known: some backends return wrong sums without a word.

    Raises:
        BackendError: The answer is wrong.
    """
    world_size = torch.distributed.get_world_size()
    value = torch.full((4,), float(torch.distributed.get_rank() + 1), device=device)
    torch.distributed.all_reduce(value)
    expected = world_size * (world_size + 1) / 2
    found = value.cpu()
    if not torch.equal(found, torch.full((4,), expected)):
        raise BackendError(
            "the process group adds up wrongly",
            expected=f"{expected} on every rank",
            found=str(found.tolist()),
            next_step="Collectives on this backend cannot be trusted; run on one rank or with gloo.",
        )


def _refuse_several_ranks(backend: Backend) -> None:
    world_size = os.environ.get("WORLD_SIZE") or "1"
    if world_size != "1":
        reason = "; collectives of XLA on the CPU are silently wrong" if backend is Backend.XLA_CPU else ""
        raise BackendError(
            f"mm2-test was launched with {world_size} ranks on {backend}",
            expected="one rank",
            found=f"WORLD_SIZE={world_size}{reason}",
            next_step="Start it without torchrun: one rank holds one layer at a time.",
        )


def _open_group(backend: Backend) -> None:
    try:
        if backend is Backend.NEURON_XLA:
            import torch_xla.distributed.xla_backend  # noqa: F401 - registers the backend "xla"

            torch.distributed.init_process_group("xla", init_method="xla://")
        else:
            name = "neuron" if backend is Backend.NEURON else "gloo"
            store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # torch does not list it in __all__
            torch.distributed.init_process_group(name, store=store, rank=0, world_size=1)
    except Exception as error:  # a foreign runtime: anything can come
        raise BackendError(
            f"no process group opens on {backend}",
            found=f"{type(error).__name__}: {error}",
            next_step="See --debug for the traceback.",
        ) from error
