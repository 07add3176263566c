"""Runtime: an open backend with its device and ranks, and the graphs it has compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice
from typing import TypeVar

import torch

from minimax_tools.capture.recorder import Calls
from minimax_tools.ranks.failure import failing_together
from minimax_tools.ranks.rank_group import RankMessages
from neuron.devices.backend import Backend, choose_backend, open_device
from neuron.devices.compiler import AUTO, CompileCounts, Compiler, choose_compiler, count_torch_compiles
from neuron.devices.distributed import (
    PATIENCE,
    model_parallel,
    open_store,
    probe_group,
    process_group,
    refuse_launched,
)
from neuron.devices.machine import device_memory_errors
from neuron.devices.ranks import Ranks
from neuron.devices.spmd import Spmd, open_spmd

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """An open backend; made by `open_runtime`."""

    backend: Backend
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)  # the processes that share a layer
    messages: RankMessages = field(default_factory=RankMessages)  # messages between these processes
    spmd: Spmd | None = None  # devices of this process that share a layer; None for one device
    compiler: Compiler | None = None  # what makes graphs of a layer; None to run it as it is

    @property
    def sharing(self) -> Mapping[str, int | str]:
        """Options by which processes, or devices of this process, share a layer, by name; {} for a single one."""
        return self.ranks.as_json() if self.spmd is None else self.spmd.as_json()

    def synchronise(self) -> None:
        """Wait until the device has computed all that was recorded."""
        with device_memory_errors("when it computed what was recorded"):
            if self.backend.is_lazy:
                import torch_xla

                torch_xla.sync(wait=True)
            elif self.backend is Backend.NEURON:
                torch.neuron.synchronize()  # type: ignore[attr-defined]  # the native backend adds this module

    def count_compiles(self) -> CompileCounts:
        """Count the graphs compiled in this process so far, and the operations that ran on the CPU instead."""
        if not self.backend.is_lazy:
            fallbacks = _native_fallbacks() if self.backend is Backend.NEURON else {}
            return replace(count_torch_compiles(), fallbacks=fallbacks)
        from torch_xla.debug import metrics

        # A tuple: number of samples, their sum in nanoseconds, and the samples.
        compile_times = metrics.metric_data("CompileTime")
        # torch_xla counts an operation under its `aten::` name only when it runs on the CPU.
        names = [name for name in metrics.counter_names() if name.startswith("aten::")]
        return CompileCounts(
            compiles=int(metrics.counter_value("UncachedCompile") or 0),
            fallbacks={name: int(metrics.counter_value(name) or 0) for name in names},
            seconds=compile_times[1] / 1e9 if compile_times else 0.0,
        )

    def peak_memory_bytes(self) -> int | None:
        """Return the device's peak memory since the process began; None for the host, and if it is unknown."""
        if self.backend is Backend.NEURON:
            return int(torch.neuron.max_memory_allocated())  # type: ignore[attr-defined]  # as in `synchronise`
        if self.backend is not Backend.NEURON_XLA:
            return None
        from torch_xla.core import xla_model

        try:
            info: Mapping[str, object] = xla_model.get_memory_info(self.device)
        except RuntimeError:
            # A PJRT plugin need not report memory.
            return None
        peak = info.get("peak_bytes_used")
        return peak if isinstance(peak, int) else None


@contextmanager
def open_runtime(
    name: str, *, compile_with: str = AUTO, ranks: Ranks | None = None, patience: timedelta = PATIENCE
) -> Iterator[Runtime]:
    """Open a backend with its process group for the block.

    An error in the block is recorded for the other ranks. If another rank's error caused it, that error is raised.

    Args:
        name: `auto`, or a value of `Backend`.
        compile_with: `auto`, `off`, or a value of `Compiler`.
        ranks: The ranks that share a layer; None for a single rank. They are processes, which all run already. On
            xla-cpu, devices of this process stand for them, and `Runtime.spmd` has them instead.
        patience: Longest wait for the other ranks in a collective call.
    """
    backend = choose_backend(name)
    refuse_launched(backend)
    compiler = choose_compiler(compile_with, backend)
    ranks, spmd = ranks or Ranks(), None
    if backend is Backend.XLA_CPU and ranks.are_several:
        spmd, ranks = open_spmd(ranks), Ranks()
    store = open_store(ranks) if ranks.are_several else None
    messages = RankMessages(ranks.rank, ranks.degree)
    with ExitStack() as stack:
        # Entered twice. The outer one records errors while groups open. The inner one records errors of the block,
        # and does so before the groups close.
        stack.enter_context(failing_together(store, ranks.rank))
        stack.enter_context(process_group(backend, ranks=ranks, store=store, patience=patience))
        stack.enter_context(failing_together(store, ranks.rank))
        device, host = open_device(backend), torch.device("cpu")
        # Collectives of XLA on the CPU cannot be trusted: there the group is gloo's, over plain tensors.
        probe_group(device if backend.is_neuron else host)
        if backend.is_neuron:
            tensor_parallel_group = stack.enter_context(model_parallel(ranks.degree))
            if tensor_parallel_group is not None:
                probe_group(device, group=tensor_parallel_group)
        messages.open()
        if ranks.are_several:
            probe_group(host, group=messages.group)
        yield Runtime(
            backend=backend, device=device, ranks=ranks, messages=messages, spmd=spmd, compiler=compiler
        )
        if ranks.is_lead:
            # Tells the other ranks that no more work comes.
            messages.send(None)


def cut_graph(device: torch.device) -> None:
    """End the graph of a lazy device here; do nothing on other devices."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors on the CPU, in their order; those that are there already are not copied."""
    if not any(tensor.device.type == "xla" for tensor in tensors):
        return [tensor.to("cpu") for tensor in tensors]
    import torch_xla

    # One transfer for all: with one for each, the host waits for the device as often. torch_xla saves its own
    # checkpoints by this function, and gives it no public name.
    library = torch_xla._XLAC  # type: ignore[attr-defined]
    on_host: list[torch.Tensor] = library._xla_get_cpu_tensors(list(tensors))
    return on_host


def calls_to_host(sites: Mapping[Key, Calls]) -> dict[Key, Calls]:
    """Return the calls of some sites on the CPU, in one transfer."""
    copies = iter(to_host([tensor for calls in sites.values() for group in calls for tensor in group]))
    return {
        site: Calls(*(tuple(islice(copies, len(group))) for group in calls)) for site, calls in sites.items()
    }


def _native_fallbacks() -> Counter[str]:
    import torch_neuronx

    # A list with a name for each time.
    return Counter(torch_neuronx.get_fallback_ops())
