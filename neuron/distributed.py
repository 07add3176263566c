"""Distributed state: a process group for the port, and Neuron's model-parallel groups; set up once, torn down.

Ports ask torch.distributed for their rank even when they run alone, so a group of one is always there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed

from minimax_tools.errors import BackendError


@contextmanager
def parallel_state(*, on_neuron: bool, native: bool) -> Iterator[None]:
    """Hold a probed process group, and on Neuron the model-parallel state, for the time of the block.

    Args:
        on_neuron: Whether the device is a NeuronCore.
        native: Whether it is driven by the native backend rather than by torch_xla.

    Raises:
        BackendError: A group is up already, several ranks were launched, or a probe gave a wrong answer.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise BackendError(
            f"mm2-test was launched with {world_size} ranks",
            expected="one rank",
            found=f"WORLD_SIZE={world_size}",
            next_step="Start it without torchrun: one rank holds one layer at a time.",
        )
    if torch.distributed.is_initialized():
        raise BackendError("torch.distributed is initialised already", next_step="Start mm2-test in a process of its own.")
    _open_group(on_neuron=on_neuron, native=native)
    try:
        if on_neuron:
            with _neuron_model_parallel():
                yield
        else:
            probe_group(torch.device("cpu"))
            yield
    finally:
        torch.distributed.destroy_process_group()


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


def _open_group(*, on_neuron: bool, native: bool) -> None:
    if native:
        torch.distributed.init_process_group("neuron", store=torch.distributed.HashStore(), rank=0, world_size=1)
    elif on_neuron:
        import torch_xla.distributed.xla_backend  # noqa: F401 - registers the backend "xla"

        torch.distributed.init_process_group("xla", init_method="xla://")
    else:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


@contextmanager
def _neuron_model_parallel() -> Iterator[None]:
    """Neuron's model-parallel groups, where neuronx-distributed is installed."""
    try:
        from neuronx_distributed.parallel_layers import parallel_state as groups
    except ImportError:
        yield
        return
    # A second initialisation does not raise there, so it is asked for here.
    if groups.model_parallel_is_initialized():
        raise BackendError(
            "parallel_state is initialised already", next_step="Start mm2-test in a process of its own."
        )
    groups.initialize_model_parallel(tensor_model_parallel_size=1)
    try:
        # The size asked for is clamped to the world silently.
        found = groups.get_tensor_model_parallel_size()
        if found != 1:
            raise BackendError("parallel_state has another tensor-parallel size", expected="1", found=str(found))
        yield
    finally:
        groups.destroy_model_parallel()
