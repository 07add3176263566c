"""Machine check: findings about a machine's devices, about settings that change numbers, and about memory and time."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import psutil
import torch

from minimax_tools.errors import BackendError, MissingExtraError, format_count
from minimax_tools.machine.finding import Level, MachineFinding
from minimax_tools.machine.memory import available_bytes
from minimax_tools.machine.progress import format_duration
from minimax_tools.machine.size import format_size
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    expected_layer_shapes,
    layer_bytes,
    one_layer_of_each_kind,
    vocabulary_bytes,
)
from minimax_tools.provenance import library_versions, numeric_environment
from minimax_tools.stored_dtype import dtype_name
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs
from neuron.devices.backend import NO_FALLBACK, Backend, choose_backend
from neuron.devices.machine import Machine
from neuron.ports.targets import find_target
from neuron.runs.resident_layer import DeviceFootprint
from neuron.runs.run_profile import RunProfile

# Largest tensor that Neuron runtimes before SDK 2.28 allow.
_MAX_TENSOR_BYTES = 4 << 30
_CACHE_VARIABLE = "NEURON_COMPILE_CACHE_URL"
# The compiler's own default, below the root folder.
_DEFAULT_CACHE = "var/tmp/neuron-compile-cache"


class _Setting(NamedTuple):
    """An environment variable's effect on numbers."""

    changes_numbers: Callable[[str], bool]  # decides whether a value of the variable has the effect
    level: Level
    effect: str
    next_step: str


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false")


_ROUNDS_TO_BF16 = _Setting(
    _is_on, Level.WARN, "rounds float32 to BF16, the router's too, and stochastically", "Unset it."
)
_SETTINGS: Mapping[str, _Setting] = MappingProxyType(
    {
        "XLA_USE_BF16": _ROUNDS_TO_BF16,
        "XLA_DOWNCAST_BF16": _ROUNDS_TO_BF16,
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": _Setting(
            _is_on, Level.WARN, "rounds at random: two runs differ, and both from the golden", "Set it to 0."
        ),
        "NEURON_CC_FLAGS": _Setting(
            lambda value: "--auto-cast" in value and "none" not in value,
            Level.WARN,
            "lets the compiler compute float32 in a smaller dtype",
            "Leave --auto-cast out, or set it to none.",
        ),
        "NEURON_FUSE_SOFTMAX": _Setting(
            _is_on, Level.NOTE, "another softmax: the last bits differ", "Set it as production does."
        ),
        "NEURON_CUSTOM_SILU": _Setting(
            _is_on, Level.NOTE, "another SiLU: the last bits differ", "Set it as production does."
        ),
        NO_FALLBACK: _Setting(
            lambda value: not _is_on(value),
            Level.WARN,
            "lets a graph that fails on the device run uncompiled, with a log line alone",
            "Unset it: mm2 sets it to 1.",
        ),
        "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": _Setting(
            lambda value: not _is_on(value),
            Level.NOTE,
            "lets an operation that fails on the device run on the CPU",
            "Set it to 1 to see the failure; a run names what ran on the CPU.",
        ),
        "XLA_DISABLE_FUNCTIONALIZATION": _Setting(
            lambda value: not _is_on(value),
            Level.WARN,
            "with functionalization on, an all-reduce of neuronx-distributed's MoE can vanish from the graph",
            "Set it to 1, as torch-neuronx does.",
        ),
    }
)


def check_machine(
    spec: ModelSpec,
    seq_lens: Sequence[int],
    *,
    backend: str,
    dtype: torch.dtype,
    profile: RunProfile | None = None,
    root: Path = Path("/"),
) -> tuple[MachineFinding, ...]:
    """Return findings about this machine.

    For each of `seq_lens`, in tokens, the memory that mm2's own layer takes is checked. `backend` may be `auto`. From a
    `profile` of a run on this machine, the time of each length is estimated. `root` is the file system's root.
    """
    machine = Machine.current(root=root)
    findings = [*_check_devices(machine), *_check_versions()]
    chosen, backend_findings = _check_backends(machine, backend)
    findings += backend_findings
    findings += _check_environment(machine)
    if machine.num_devices:
        findings.append(_check_cache(root))
    findings += _check_device_memory(machine, spec, dtype)
    if chosen is not None:
        free_host_bytes = available_bytes(root=root)
        num_experts_at_once = find_target("builtin").num_experts_at_once(
            spec, dtype=dtype, is_lazy=chosen.is_lazy
        )
        for seq_len in seq_lens:
            # Rows of random tokens, so no file of `folder` is read.
            footprint = DeviceFootprint(
                spec=spec,
                dtype=dtype,
                inputs=build_inputs(InputRequest(seq_lens=(seq_len,)), folder=root, spec=spec),
                backend=chosen,
                num_experts_at_once=num_experts_at_once,
            )
            findings.append(_check_host_memory(footprint, free_host_bytes))
            findings += _check_device_activations(machine, footprint)
    if profile is not None:
        profile.verify(
            spec_digest=spec.digest(),
            dtype=dtype_name(dtype),
            backend=None if chosen is None else str(chosen),
        )
        findings += [_estimate_time(profile, spec, seq_len) for seq_len in seq_lens]
    return tuple(findings)


def _check_devices(machine: Machine) -> Iterator[MachineFinding]:
    host_memory = format_size(psutil.virtual_memory().total)
    if machine.instance_type is None and not machine.num_devices:
        yield MachineFinding(
            Level.NOTE,
            "machine",
            f"no Neuron device; {psutil.cpu_count()} cores, {host_memory}",
            "--backend xla-cpu runs the same graphs as on Trainium, --backend cpu plain torch.",
        )
        return
    name = machine.instance_type or "an instance of unknown type"
    if not machine.num_devices:
        yield MachineFinding(
            Level.FAIL,
            "machine",
            f"{name}, and the driver shows no device: there is no /dev/neuron0",
            "Install and load the driver (aws-neuronx-dkms), or give the container its devices.",
        )
        return
    cores = "" if machine.num_cores is None else f", {machine.num_cores} cores"
    hbm = "" if machine.hbm_bytes_per_core is None else f" of {machine.hbm_bytes_per_core >> 30} GiB each"
    devices = format_count(machine.num_devices, "device")
    yield MachineFinding(Level.OK, "machine", f"{name}: {devices}{cores}{hbm}; host {host_memory}")


def _check_versions() -> Iterator[MachineFinding]:
    versions = library_versions()
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield MachineFinding(Level.OK, "versions", shown)
    torch_minor, xla_minor = (_minor_version(versions.get(name)) for name in ("torch", "torch_xla"))
    if xla_minor is not None and torch_minor != xla_minor:
        yield MachineFinding(
            Level.FAIL,
            "versions",
            f"torch {versions['torch']} and torch_xla {versions['torch_xla']} do not go together",
            f"Install torch {xla_minor}, or the torch_xla of torch {torch_minor}.",
        )


def _minor_version(version: str | None) -> str | None:
    return None if version is None else ".".join(version.split("+")[0].split(".")[:2])


def _check_backends(machine: Machine, backend: str) -> tuple[Backend | None, list[MachineFinding]]:
    try:
        chosen = choose_backend(backend)
    except (BackendError, MissingExtraError) as error:
        found = f"{error.what}: {error.found}" if error.found else error.what
        return None, [MachineFinding(Level.FAIL, "backend", found, error.next_step or "")]
    findings = [MachineFinding(Level.OK, "backend", f"{chosen}: {chosen.description}")]
    if machine.num_devices and not chosen.is_neuron:
        wanted = Backend.NEURON if machine.has_native_backend else Backend.NEURON_XLA
        findings.append(_explain_unused_devices(wanted))
    return chosen, findings


def _explain_unused_devices(backend: Backend) -> MachineFinding:
    """Return the reason why a run would not compute on the machine's devices, which `backend` drives."""
    try:
        choose_backend(str(backend))
        reason, next_step = "another backend was asked for", f"--backend {backend} computes on the devices."
    except (BackendError, MissingExtraError) as error:
        reason, next_step = error.found or error.what, "Run in the Neuron SDK's virtual environment."
    found = f"nothing would run on this machine's Neuron devices: {reason}"
    return MachineFinding(Level.WARN, "backend", found, next_step)


def _check_environment(machine: Machine) -> Iterator[MachineFinding]:
    # Variables that are set and may change numbers, `PJRT_DEVICE` among them.
    variables = numeric_environment()
    found_any = False
    for name, value in variables.items():
        setting = _SETTINGS.get(name)
        if setting is not None and setting.changes_numbers(value):
            found_any = True
            found = f"{name}={value} {setting.effect}"
            yield MachineFinding(setting.level, "environment", found, setting.next_step)
    if machine.num_devices and variables.get("PJRT_DEVICE", "NEURON") != "NEURON":
        found_any = True
        found = f"PJRT_DEVICE={variables['PJRT_DEVICE']} keeps torch_xla off the Neuron devices"
        yield MachineFinding(Level.FAIL, "environment", found, "Unset it.")
    if not found_any:
        others = ", ".join(f"{name}={value}" for name, value in variables.items())
        found = "no variable changes what is computed" + (f" (set: {others})" if others else "")
        yield MachineFinding(Level.OK, "environment", found)


def _check_cache(root: Path) -> MachineFinding:
    url = os.environ.get(_CACHE_VARIABLE, "")
    if url.startswith("s3://"):
        return MachineFinding(Level.OK, "compile cache", f"{url}: not looked into")
    folder = Path(url.removeprefix("file://")) if url else root / _DEFAULT_CACHE
    # The compiler creates the cache; until then the folder above decides.
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        # Permissions alone do not tell: a file system may be read-only.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return MachineFinding(
            Level.WARN,
            "compile cache",
            f"{folder} cannot be written to ({error.strerror}): every run compiles again",
            f"Set {_CACHE_VARIABLE} to a folder that can be written to, or to s3://….",
        )
    free = format_size(shutil.disk_usage(existing).free)
    return MachineFinding(Level.OK, "compile cache", f"{folder}, {free} free")


def _check_device_memory(machine: Machine, spec: ModelSpec, dtype: torch.dtype) -> Iterator[MachineFinding]:
    weight_bytes, head_bytes = layer_bytes(spec, dtype), vocabulary_bytes(spec, dtype)
    hbm_bytes = machine.hbm_bytes_per_core
    if hbm_bytes is not None:
        yield _fit_finding(
            "device memory",
            f"a layer takes {format_size(weight_bytes)}, the lm_head {format_size(head_bytes)}, "
            f"of {format_size(hbm_bytes)} on a core",
            "Share it among cores with --tp-degree, or take a smaller dtype.",
            fits=max(weight_bytes, head_bytes) <= hbm_bytes,
        )
    # The largest in a MiniMax-M2: a port may hold gate and up of all experts in one tensor.
    gate_up_bytes = spec.num_local_experts * 2 * spec.intermediate_size * spec.hidden_size * dtype.itemsize
    tensor_bytes = (
        math.prod(shape) * dtype.itemsize
        for layer in one_layer_of_each_kind(spec)
        for shape in expected_layer_shapes(spec, layer).values()
    )
    largest_bytes = max(gate_up_bytes, head_bytes, *tensor_bytes)
    if largest_bytes > _MAX_TENSOR_BYTES:
        yield MachineFinding(
            Level.NOTE,
            "tensor size",
            f"gate and up of all experts in one tensor take {format_size(largest_bytes)}, over the 4 GiB that "
            "runtimes before SDK 2.28 allow",
            "In a port, run experts in chunks, as mm2's own layer does, or share them with --tp-degree.",
        )


def _check_device_activations(machine: Machine, footprint: DeviceFootprint) -> Iterator[MachineFinding]:
    hbm_bytes = machine.hbm_bytes_per_core
    if hbm_bytes is None:
        return
    # A footprint is of the host's memory. With the backend `cpu`, that holds all that a device holds in its own.
    on_device = replace(footprint, backend=Backend.CPU)
    needed_bytes = on_device.loaded_layer_bytes + on_device.activation_bytes
    yield _fit_finding(
        "device memory by length",
        f"a layer and its activations for {footprint.inputs.sequence_length} tokens take about "
        f"{format_size(needed_bytes)}, of {format_size(hbm_bytes)} on a core",
        "Share the layer among more ranks with --tp-degree, or run shorter rows.",
        fits=needed_bytes <= hbm_bytes,
    )


def _check_host_memory(footprint: DeviceFootprint, free_bytes: int) -> MachineFinding:
    needed_bytes = footprint.loaded_layer_bytes + footprint.activation_bytes
    return _fit_finding(
        "host memory",
        f"a layer and {footprint.inputs.sequence_length} tokens take {format_size(needed_bytes)}, "
        f"{format_size(free_bytes)} are free",
        "Free memory, or run fewer or shorter rows.",
        fits=needed_bytes <= free_bytes,
    )


def _fit_finding(subject: str, found: str, next_step: str, *, fits: bool) -> MachineFinding:
    if fits:
        return MachineFinding(Level.OK, subject, found)
    return MachineFinding(Level.FAIL, subject, found, next_step)


def _estimate_time(profile: RunProfile, spec: ModelSpec, seq_len: int) -> MachineFinding:
    """Estimate the time of a row from a run: computing grows with the length, loading does not."""
    median = profile.median_times
    profiled_flops = profile.batch_size * _row_flops(spec, profile.sequence_length)
    run_s = median.run_s * _row_flops(spec, seq_len) / profiled_flops
    copy_back_s = median.copy_back_s * seq_len / (profile.batch_size * profile.sequence_length)
    loading_s = median.read_s + median.regroup_s + median.transfer_s
    layer_s = loading_s + run_s + copy_back_s
    model_time = format_duration(layer_s * spec.num_hidden_layers)
    return MachineFinding(
        Level.OK,
        "time",
        f"a row of {seq_len} tokens takes about {layer_s:.2f} s a layer ({loading_s:.2f} s to load, "
        f"{run_s:.2f} s to run) and {model_time} for {spec.num_hidden_layers} layers on {profile.backend}, "
        "compiling aside",
    )


def _row_flops(spec: ModelSpec, seq_len: int) -> float:
    """Return the operations for one row in one layer of mm2's own, in which every expert computes every token."""
    # A multiply-add is two operations: the first 2 of each product. The other factors: q and o, k and v; gate, up and
    # down; scores and values.
    projections = 2 * spec.hidden_size * (2 * spec.query_width + 2 * spec.key_value_width)
    experts = 2 * 3 * spec.num_local_experts * spec.hidden_size * spec.intermediate_size
    attention = 2 * 2 * spec.query_width * seq_len
    return seq_len * (projections + experts + attention)
