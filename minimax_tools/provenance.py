"""Provenance of a capture, detailed enough to refuse a misleading comparison or resumption."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimax_tools.checkpoint.fingerprint import ModelFingerprint

# In the order in which a manifest lists their versions.
_PACKAGES = (
    *("torch", "torch_xla"),
    *("torch-neuronx", "neuronx-distributed", "neuronx-cc", "libneuronxla"),
    *("transformers", "accelerate", "safetensors"),
)
# Variables that change numbers on one of the backends, in the order in which a manifest lists them.
_NUMERIC_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "MKL_NUM_THREADS"),
    *("NEURON_CC_FLAGS", "NEURON_CUSTOM_SILU", "NEURON_FUSE_SOFTMAX", "NEURON_RT_STOCHASTIC_ROUNDING_EN"),
    *("NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "PJRT_DEVICE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("XLA_DISABLE_FUNCTIONALIZATION", "XLA_DOWNCAST_BF16", "XLA_FLAGS", "XLA_USE_BF16"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The maker of a capture: model, software, machine and options.

    Args:
        model: Fingerprint of the checkpoint's weights.
        model_source: Folder or hub id, as it was given.
        backend: Name of the backend that computed, such as `cuda`, `neuron-xla`, `xla-cpu`, `cpu`.
        device: Description of the device.
        dtypes: Dtype of `weights`, `router_gate` and `correction_bias` in the computation.
        target: Implementation that ran: `transformers`, `builtin`, or a target's name.
        target_digest: sha256 of the target's source; empty for implementations of a library.
        options: Choices that change numbers, such as the attention and experts implementation.
        versions: Library versions.
        environment: Environment variables that change numbers, if set.
    """

    model: ModelFingerprint
    model_source: str
    backend: str
    device: str
    dtypes: Mapping[str, str]
    target: str
    target_digest: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=lambda: library_versions())
    environment: Mapping[str, str] = field(default_factory=lambda: numeric_environment())


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that compute, by name."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed on this machine
    return versions


def numeric_environment() -> dict[str, str]:
    """Return the environment variables that change numbers, if set."""
    return {name: os.environ[name] for name in _NUMERIC_VARIABLES if name in os.environ}
