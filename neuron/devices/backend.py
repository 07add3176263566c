"""Backend: the device and library that compute, and the choice of it: by what works rather than by what is installed.

`auto` takes the first that works: the native Neuron backend, XLA on Neuron, the CPU. XLA on the CPU runs only when
asked for, and is never called Neuron.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from minimax_tools.errors import BackendError, MissingExtraError
from minimax_tools.machine.importing import importing
from minimax_tools.text_enum import TextEnum

if TYPE_CHECKING:
    import torch


class Backend(TextEnum):
    """A device with the library that drives it."""

    NEURON = "neuron"  # torch-neuronx >= 2.13, native
    NEURON_XLA = "neuron-xla"  # torch-neuronx <= 2.9 over torch_xla
    XLA_CPU = "xla-cpu"  # torch_xla on PJRT CPU
    CPU = "cpu"  # plain torch

    @property
    def is_lazy(self) -> bool:
        """True if operations are recorded into graphs, which run at a sync."""
        return self in (Backend.NEURON_XLA, Backend.XLA_CPU)

    @property
    def is_neuron(self) -> bool:
        """True if a NeuronCore computes."""
        return self in (Backend.NEURON, Backend.NEURON_XLA)

    @property
    def description(self) -> str:
        """The device in words."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Backend.NEURON: "Neuron, native",
    Backend.NEURON_XLA: "Neuron over torch_xla",
    Backend.XLA_CPU: "CPU over torch_xla (PJRT)",
    Backend.CPU: "cpu",
}


# The variable that says which device torch_xla drives, through XLA's device plug-ins (PJRT).
_PJRT_DEVICE = "PJRT_DEVICE"
# TorchNeuron's variable: with 1, a compiled graph that fails is an error.
NO_FALLBACK = "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION"


def choose_backend(name: str) -> Backend:
    """Return the backend of a name, checked to be available; for `auto`, the best one that is.

    Raises:
        BackendError: The backend is not available here.
        MissingExtraError: torch_xla is not installed.
    """
    if name == "auto":
        return _detect_backend()
    import torch

    backend = Backend(name)
    if backend is Backend.NEURON and not _has_native_neuron():
        raise BackendError(
            "the backend neuron is not available here",
            expected="torch-neuronx 2.13 or newer on Trn2 or Trn3",
            found=f"torch {torch.__version__} without it",
            next_step="Use --backend neuron-xla on Trn1 and Inf2, or --backend cpu.",
        )
    if backend is Backend.NEURON_XLA and (obstacle := _find_xla_obstacle()):
        raise BackendError(
            "the backend neuron-xla is not available here",
            expected="torch_xla with libneuronxla on a Trn1, Inf2 or Trn2 instance",
            found=obstacle,
            next_step="Run there, in the Neuron SDK's virtual environment, or use --backend xla-cpu.",
        )
    if backend is Backend.XLA_CPU and importlib.util.find_spec("torch_xla") is None:
        raise MissingExtraError("torch_xla", extra="xla", needed_for="--backend xla-cpu")
    return backend


def open_device(backend: Backend) -> torch.device:
    """Open the torch device of a backend that `choose_backend` returned."""
    import torch

    if backend is Backend.CPU:
        return torch.device("cpu")
    if backend is Backend.NEURON:
        # Early releases run a graph that fails on the device op by op, with a log line alone.
        os.environ.setdefault(NO_FALLBACK, "1")
        return torch.device("neuron")
    if backend is Backend.XLA_CPU:
        # Before torch_xla is imported: its import would choose a device itself.
        os.environ[_PJRT_DEVICE] = "CPU"
    return _open_xla_device(backend, expected="NEURON" if backend.is_neuron else "CPU")


def _open_xla_device(backend: Backend, *, expected: str) -> torch.device:
    try:
        with importing():
            import torch
            import torch_xla
            from torch_xla.core import xla_model

        device = torch.device(torch_xla.device())
        found = xla_model.xla_device_hw(device)
    except Exception as error:  # a foreign runtime: anything can come
        raise BackendError(
            f"the backend {backend} does not start",
            found=f"{type(error).__name__}: {error}",
            next_step="See --debug for the traceback, or choose another --backend.",
        ) from error
    if found != expected:
        raise BackendError(
            f"torch_xla drives another device than {backend}",
            expected=expected,
            found=found,
            next_step=f"Start mm2-test in a process of its own, with {_PJRT_DEVICE} unset.",
        )
    return device


def _detect_backend() -> Backend:
    if _has_native_neuron():
        return Backend.NEURON
    if _find_xla_obstacle() is None:
        return Backend.NEURON_XLA
    return Backend.CPU


def _has_native_neuron() -> bool:
    import torch

    # The native backend registers itself with torch under this name.
    if torch._C._get_privateuse1_backend_name() != "neuron":
        return False
    return bool(torch.neuron.is_available())  # type: ignore[attr-defined]  # the native backend adds this module


def _find_xla_obstacle() -> str | None:
    """Say why XLA does not run on Neuron here; return None if it does.

    torch_xla is imported, and imports libneuronxla: a package may be an empty placeholder from PyPI, which raises.
    """
    # Read first: importing torch_xla sets this variable.
    if os.environ.get(_PJRT_DEVICE, "NEURON") != "NEURON":
        return f"{_PJRT_DEVICE}={os.environ[_PJRT_DEVICE]}"
    for package in ("torch_xla", "libneuronxla"):
        if importlib.util.find_spec(package) is None:
            return f"no {package}"
    try:
        import torch_xla
    except Exception as error:  # a placeholder may raise anything
        return f"{type(error).__name__}: {error}"
    if not getattr(torch_xla, "_found_libneuronxla", False):
        return "a libneuronxla that torch_xla cannot use"
    return None
