"""Runtime: which device runs the port, chosen by what works rather than by what is installed.

Order of `auto`: the native Neuron backend, XLA on Neuron, the CPU. XLA on the CPU runs only when asked for,
and is never called Neuron.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch

from minimax_tools.errors import BackendError, MissingExtraError
from neuron.distributed import parallel_state


class Backend(str, Enum):
    """What computes."""

    NEURON = "neuron"  # torch-neuronx >= 2.13, native
    NEURON_XLA = "neuron-xla"  # torch-neuronx <= 2.9 over torch_xla
    XLA_CPU = "xla-cpu"  # torch_xla on PJRT CPU
    CPU = "cpu"  # plain torch

    def __str__(self) -> str:
        return self.value

    @property
    def is_lazy(self) -> bool:
        """Whether operations are recorded into graphs and run at a sync."""
        return self in (Backend.NEURON_XLA, Backend.XLA_CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCounts:
    """Graphs compiled so far, and operations that fell back to the CPU; both zero off XLA."""

    compiles: int
    fallbacks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """An opened backend; made by `open_runtime`.

    Args:
        backend: Which one.
        device: Its torch device.
        description: The device in words.
    """

    backend: Backend
    device: torch.device
    description: str

    def synchronise(self) -> None:
        """Wait until everything recorded so far has been computed."""
        if self.backend.is_lazy:
            import torch_xla

            torch_xla.sync(wait=True)
        elif self.backend is Backend.NEURON:
            torch.neuron.synchronize()  # type: ignore[attr-defined]  # the native backend adds this module

    def count_compiles(self) -> CompileCounts:
        """How many graphs were compiled in this process, and which operations ran on the CPU instead."""
        if not self.backend.is_lazy:
            return CompileCounts(compiles=0, fallbacks=())
        from torch_xla.debug import metrics

        counters = metrics.counter_names()
        return CompileCounts(
            compiles=int(metrics.counter_value("UncachedCompile") or 0),
            fallbacks=tuple(sorted(name for name in counters if name.startswith("aten::"))),
        )


@contextmanager
def open_runtime(name: str) -> Iterator[Runtime]:
    """Open the backend `name` (`auto` or a value of `Backend`) with its process group, and close both after.

    Raises:
        BackendError: The backend is not available here.
        MissingExtraError: torch_xla is not installed.
    """
    backend = _detect() if name == "auto" else Backend(name)
    with parallel_state(on_neuron=backend in (Backend.NEURON, Backend.NEURON_XLA), native=backend is Backend.NEURON):
        yield _OPENERS[backend]()


def cut_graph(device: torch.device) -> None:
    """End a lazy device's graph here, so that what follows compiles on its own; nothing elsewhere."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def _detect() -> Backend:
    if _has_native_neuron():
        return Backend.NEURON
    if _has_xla_on_neuron():
        return Backend.NEURON_XLA
    return Backend.CPU


def _has_native_neuron() -> bool:
    if torch._C._get_privateuse1_backend_name() != "neuron":
        return False
    return bool(torch.neuron.is_available())  # type: ignore[attr-defined]  # as above


def _has_xla_on_neuron() -> bool:
    """By capability: the packages of these names on PyPI are empty placeholders."""
    if importlib.util.find_spec("torch_xla") is None or os.environ.get("PJRT_DEVICE", "NEURON") != "NEURON":
        return False
    if importlib.util.find_spec("libneuronxla") is None:
        return False
    import torch_xla

    return bool(getattr(torch_xla, "_found_libneuronxla", False))


def _open_native() -> Runtime:
    if not _has_native_neuron():
        raise BackendError(
            "the backend neuron is not available here",
            expected="torch-neuronx 2.13 or newer on Trn2 or Trn3",
            found=f"torch {torch.__version__} without it",
            next_step="Use --backend neuron-xla on Trn1 and Inf2, or --backend cpu.",
        )
    return Runtime(backend=Backend.NEURON, device=torch.device("neuron"), description="Neuron, native")


def _open_neuron_xla() -> Runtime:
    if not _has_xla_on_neuron():
        raise BackendError(
            "the backend neuron-xla is not available here",
            expected="torch_xla with libneuronxla on a Trn1, Inf2 or Trn2 instance",
            found="no Neuron runtime",
            next_step="Run on such an instance with the Neuron SDK's virtual environment, or use --backend xla-cpu.",
        )
    return Runtime(backend=Backend.NEURON_XLA, device=_xla_device(), description="Neuron over torch_xla")


def _open_xla_cpu() -> Runtime:
    if importlib.util.find_spec("torch_xla") is None:
        raise MissingExtraError("torch_xla", extra="xla", needed_for="--backend xla-cpu")
    # Before torch_xla is imported: its import would choose for itself.
    os.environ["PJRT_DEVICE"] = "CPU"
    return Runtime(backend=Backend.XLA_CPU, device=_xla_device(), description="CPU over torch_xla (PJRT)")


def _open_cpu() -> Runtime:
    return Runtime(backend=Backend.CPU, device=torch.device("cpu"), description="CPU")


def _xla_device() -> torch.device:
    import torch_xla

    return torch.device(torch_xla.device())


_OPENERS = {
    Backend.NEURON: _open_native,
    Backend.NEURON_XLA: _open_neuron_xla,
    Backend.XLA_CPU: _open_xla_cpu,
    Backend.CPU: _open_cpu,
}
