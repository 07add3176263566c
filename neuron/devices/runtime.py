"""Runtime: an opened backend with its device, its ranks and their process group, and the graphs it has compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from neuron.devices.backend import Backend, choose_backend, open_device
from neuron.devices.distributed import PATIENCE, model_parallel, probe_group, process_group, refuse_launched
from neuron.devices.rank_messages import Crew, open_store
from neuron.devices.ranks import Ranks
from neuron.devices.spmd import Spmd, open_spmd


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCounts:
    """Graphs compiled and the time they took, and how often each operation fell back to the CPU; nothing off XLA."""

    compiles: int
    fallbacks: Mapping[str, int]
    seconds: float = 0.0

    def since(self, earlier: CompileCounts) -> CompileCounts:
        """What came after `earlier`."""
        grown = {name: count - earlier.fallbacks.get(name, 0) for name, count in self.fallbacks.items()}
        return CompileCounts(
            compiles=self.compiles - earlier.compiles,
            fallbacks={name: count for name, count in grown.items() if count},
            seconds=self.seconds - earlier.seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """An opened backend; made by `open_runtime`.

    Args:
        backend: Which one.
        device: Its torch device.
        crew: The ranks that share a layer.
        spmd: The devices that share it within this process; None where there is one.
    """

    backend: Backend
    device: torch.device
    crew: Crew = field(default_factory=lambda: Crew(Ranks()))
    spmd: Spmd | None = None

    @property
    def ranks(self) -> Ranks:
        """Which rank this is, of how many processes."""
        return self.crew.ranks

    @property
    def sharing(self) -> Mapping[str, int | str]:
        """How processes share a layer, or devices within this one, as options by name; nothing where none do."""
        return self.ranks.as_json() if self.spmd is None else self.spmd.as_json()

    def synchronise(self) -> None:
        """Wait until everything recorded so far has been computed."""
        if self.backend.is_lazy:
            import torch_xla

            torch_xla.sync(wait=True)
        elif self.backend is Backend.NEURON:
            torch.neuron.synchronize()  # type: ignore[attr-defined]  # the native backend adds this module

    def count_compiles(self) -> CompileCounts:
        """Graphs compiled in this process so far, and operations that ran on the CPU instead."""
        if not self.backend.is_lazy:
            return CompileCounts(compiles=0, fallbacks={})
        from torch_xla.debug import metrics

        # Number of samples, their sum in nanoseconds, and the samples.
        compile_times = metrics.metric_data("CompileTime")
        fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
        return CompileCounts(
            compiles=int(metrics.counter_value("UncachedCompile") or 0),
            fallbacks={name: int(metrics.counter_value(name) or 0) for name in fallbacks},
            seconds=compile_times[1] / 1e9 if compile_times else 0.0,
        )

    def peak_memory_bytes(self) -> int | None:
        """The most that the device held since the process began; None where it does not tell, or is the host."""
        if self.backend is not Backend.NEURON_XLA:
            return None
        from torch_xla.core import xla_model

        try:
            info: Mapping[str, object] = xla_model.get_memory_info(self.device)
        except RuntimeError:
            # What a PJRT plugin tells is left to it.
            return None
        peak = info.get("peak_bytes_used")
        return peak if isinstance(peak, int) else None


@contextmanager
def open_runtime(
    name: str, *, ranks: Ranks | None = None, patience: timedelta = PATIENCE
) -> Iterator[Runtime]:
    """Open the backend `name` (`auto` or a value of `Backend`) with its process group, and close both after.

    An error in the block is told to the other ranks; one of theirs that is its cause is raised instead.

    Args:
        name: The backend.
        ranks: Those that share a layer, launched all; of XLA on the CPU as many devices within this process. None
            for one.
        patience: How long one waits for the others in a collective call, before that ends the run.

    Raises:
        BackendError: The backend is not available here, or its process group cannot be trusted.
        MissingExtraError: torch_xla is not installed.
        RankFailedError: Another rank failed.
        RankUnheardError: The others do not make the same calls.
    """
    backend = choose_backend(name)
    refuse_launched(backend)
    ranks, spmd = ranks or Ranks(), None
    if backend is Backend.XLA_CPU and ranks.are_several:
        spmd, ranks = open_spmd(ranks), Ranks()
    store = open_store(ranks) if ranks.are_several else None
    crew = Crew(ranks, store)
    with ExitStack() as stack:
        # Once for what happens while groups are opened, and once for what happens in them: word of an error must be
        # out before they close.
        stack.enter_context(crew.failing_together())
        stack.enter_context(process_group(backend, ranks=ranks, store=store, patience=patience))
        stack.enter_context(crew.failing_together())
        device = open_device(backend)
        # XLA on the CPU has no collectives to trust: its group is gloo's, over plain tensors.
        probe_group(device if backend.is_neuron else torch.device("cpu"))
        if backend.is_neuron:
            tensor_parallel_group = stack.enter_context(model_parallel(ranks.degree))
            if tensor_parallel_group is not None:
                probe_group(device, group=tensor_parallel_group)
        crew.meet()
        yield Runtime(backend=backend, device=device, crew=crew, spmd=spmd)
        if ranks.is_lead:
            # They may go.
            crew.tell(None)


def cut_graph(device: torch.device) -> None:
    """End a lazy device's graph here, so that what follows compiles on its own; nothing elsewhere."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()
