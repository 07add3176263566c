"""Provenance of a capture, detailed enough to refuse a misleading comparison or resumption."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from minimax_tools.json_codec import omit_default

# In the order in which a manifest lists their versions.
_PACKAGES = (
    "torch", "torch_xla",
    "torch-neuronx", "neuronx-distributed", "neuronx-cc", "libneuronxla",
    "transformers", "accelerate", "safetensors",
)  # fmt: skip
# Fields of `Provenance` that are kept for the reader, and by which no two captures differ.
CONFIGS = ("model_config", "port_config")
# Variables that change numbers on one of the backends, in the order in which a manifest lists them.
_NUMERIC_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "MKL_NUM_THREADS",
    "NEURON_CC_FLAGS", "NEURON_CUSTOM_SILU", "NEURON_FUSE_SOFTMAX", "NEURON_RT_STOCHASTIC_ROUNDING_EN",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "PJRT_DEVICE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS",
    "XLA_DISABLE_FUNCTIONALIZATION", "XLA_DOWNCAST_BF16", "XLA_FLAGS", "XLA_USE_BF16",
)  # fmt: skip


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that compute, by name."""
    return dict(_find_versions(tuple(sys.path)))


@cache
def _find_versions(_folders: tuple[str, ...]) -> dict[str, str]:
    """Find the versions once for the folders in `sys.path`: the search goes through all of them."""
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


def digest_sources(files: Mapping[str, Path]) -> str:
    """Return sha256 over the names and contents of a port's source files, in the order of their names."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        source = path.read_bytes()
        digest.update(f"{name} {len(source)}\n".encode())
        digest.update(source)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFingerprint:
    """sha256 digests of a model's config, of tensors' names and shapes, and of some values of each layer.

    Parts that one side lacks are not compared: a folder with some layers of a model agrees with the whole model.
    """

    spec_digest: str  # of the quantities in config.json, number of layers included
    # Of names and shapes of the tensors outside all layers; None if the folder lacks some.
    tensors_digest: str | None
    layers: Mapping[int, str]  # of the values of each layer's norms, router gate and bias
    layer_tensors: Mapping[int, str] = field(default_factory=dict)  # of names and shapes of their tensors

    def differences(self, other: ModelFingerprint) -> list[str]:
        """Return one sentence for each difference between the models, in the parts that both have."""
        sentences = []
        if self.spec_digest != other.spec_digest:
            sentences.append(f"config.json differs ({_format_pair(self.spec_digest, other.spec_digest)})")
        digest, other_digest = self.tensors_digest, other.tensors_digest
        if digest is not None and other_digest is not None and digest != other_digest:
            pair = _format_pair(digest, other_digest)
            sentences.append(f"tensor names or shapes outside the layers differ ({pair})")
        sentences += _layer_differences(
            self.layer_tensors, other.layer_tensors, "has other tensor names or shapes"
        )
        return sentences + _layer_differences(
            self.layers, other.layers, "has other norms, router gate or bias"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The maker of a capture: model, software, machine and options."""

    model: ModelFingerprint  # of the checkpoint's weights
    model_source: str  # folder, hub id or address, as it was given
    backend: str  # name of the backend that computed, such as `cuda`, `neuron-xla`, `xla-cpu`, `cpu`
    device: str  # description of the device
    dtypes: Mapping[str, str]  # dtype of `weights`, `router_gate` and `correction_bias` in the computation
    target: str  # implementation that ran: `transformers`, `builtin`, or a port's name
    target_digest: str = ""  # sha256 of the port's source; empty for implementations of a library
    # Choices that change numbers, such as the attention and experts implementation.
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=library_versions)
    environment: Mapping[str, str] = field(default_factory=numeric_environment)
    # For the reader alone: `model` and `target_digest` decide whether two captures are of one model and one port.
    model_config: Mapping[str, Any] = field(default_factory=dict)  # values of config.json
    port_config: Mapping[str, Any] = field(default_factory=dict)  # a port's `mm2_neuron_config`


# What a model or a port does not tell is left out.
omit_default(Provenance, *CONFIGS)


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values as JSON takes them; what JSON has no form for, such as a dtype, becomes text."""
    return {str(name): _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain_values(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return value if value is None or isinstance(value, str) or is_number else str(value)


def _layer_differences(digests: Mapping[int, str], others: Mapping[int, str], predicate: str) -> list[str]:
    """Return one sentence for each layer that both have with different digests; `predicate` says what differs."""
    return [
        f"layer {layer} {predicate} ({_format_pair(digests[layer], others[layer])})"
        for layer in sorted(digests.keys() & others.keys())
        if digests[layer] != others[layer]
    ]


def _format_pair(digest: str, other: str) -> str:
    return f"sha256 {digest[:8]} against {other[:8]}"
