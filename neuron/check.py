"""The check of a machine: what it is, what changes numbers on it, and whether a layer fits.

Every finding says what is so and, where something is to be done, what. `fail` is what keeps a run from working, `warn`
what makes its numbers others than they seem, `note` what is good to know.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import psutil
import torch

from minimax_tools.capture.manifest import dtype_name
from minimax_tools.command_line.progress import word_duration
from minimax_tools.errors import BackendError, MissingExtraError
from minimax_tools.machine.memory import available_bytes
from minimax_tools.machine.size import word_size
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expected_layer_shapes, layer_bytes, vocabulary_bytes
from minimax_tools.provenance import library_versions, numeric_environment
from minimax_tools.text.prompts import InputRequest, build_inputs
from neuron.devices.backend import Backend, choose_backend
from neuron.devices.machine import Machine
from neuron.ports.targets import find_target
from neuron.runs.footprint import DeviceFootprint
from neuron.runs.run_profile import RunProfile

# One tensor of runtimes before SDK 2.28.
_MAX_TENSOR_BYTES = 4 << 30
_CACHE_VARIABLE = "NEURON_COMPILE_CACHE_URL"
_DEFAULT_CACHE = "var/tmp/neuron-compile-cache"


class Level(str, Enum):
    """How much a finding matters, the most last."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFinding:
    """One thing that was looked at.

    Args:
        level: How much it matters.
        subject: What was looked at, in a word or two.
        found: What is so.
        next_step: What to do about it; empty where nothing is.
    """

    level: Level
    subject: str
    found: str
    next_step: str = ""


class _Setting(NamedTuple):
    """What a value of a variable does to numbers, and what to do about it."""

    changes: Callable[[str], bool]
    level: Level
    effect: str
    next_step: str


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false")


_SETTINGS: Mapping[str, _Setting] = MappingProxyType(
    {
        "XLA_USE_BF16": _Setting(
            _is_on, Level.WARN, "rounds float32 to BF16, the router's too, and stochastically", "Unset it."
        ),
        "XLA_DOWNCAST_BF16": _Setting(
            _is_on, Level.WARN, "rounds float32 to BF16, the router's too, and stochastically", "Unset it."
        ),
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
    """Look at this machine.

    Args:
        spec: The model that is to run.
        seq_lens: Lengths of a row; the memory that mm2's own layer takes of the host is told for each.
        backend: As for `choose_backend`.
        dtype: Of weights and activations.
        profile: Of a run on this machine, from which the time that other lengths take is told; None for none.
        root: Where `dev`, `sys` and `var` lie.

    Raises:
        CaptureError: The profile is of another model, dtype or backend, of several ranks, or of a run that decodes.
    """
    machine = Machine.current(root=root)
    findings = [*_look_at_machine(machine), *_look_at_versions()]
    chosen, backends = _look_at_backends(machine, backend)
    findings += backends
    findings += _look_at_environment(machine)
    if machine.num_devices:
        findings.append(_look_at_cache(root))
    findings += _look_at_device_memory(machine, spec, dtype)
    if chosen is not None:
        free = available_bytes(root=root)
        for seq_len in seq_lens:
            inputs = build_inputs(InputRequest(seq_lens=(seq_len,)), folder=root, spec=spec)
            footprint = DeviceFootprint(
                spec=spec,
                dtype=dtype,
                inputs=inputs,
                backend=chosen,
                num_experts_at_once=find_target("builtin").num_experts_at_once(
                    spec, dtype=dtype, is_lazy=chosen.is_lazy
                ),
            )
            findings.append(_look_at_host_memory(footprint, free))
            findings += _look_at_device_activations(machine, footprint)
    if profile is not None:
        profile.verify(
            spec_digest=spec.digest(),
            dtype=dtype_name(dtype),
            backend=None if chosen is None else str(chosen),
        )
        findings += [_look_at_time(profile, spec, seq_len) for seq_len in seq_lens]
    return tuple(findings)


def worst(findings: Sequence[MachineFinding]) -> Level:
    """The level that matters most."""
    return max((finding.level for finding in findings), key=tuple(Level).index, default=Level.OK)


def _look_at_machine(machine: Machine) -> Iterator[MachineFinding]:
    if machine.instance_type is None and not machine.num_devices:
        yield MachineFinding(
            level=Level.NOTE,
            subject="machine",
            found=f"no Neuron device; {psutil.cpu_count()} cores, {word_size(psutil.virtual_memory().total)}",
            next_step="--backend xla-cpu runs the same graphs as on Trainium, --backend cpu plain torch.",
        )
        return
    name = machine.instance_type or "an instance of unknown type"
    if not machine.num_devices:
        yield MachineFinding(
            level=Level.FAIL,
            subject="machine",
            found=f"{name}, and the driver shows no device: there is no /dev/neuron0",
            next_step="Install and load the driver (aws-neuronx-dkms), or give the container its devices.",
        )
        return
    cores = "" if machine.num_cores is None else f", {machine.num_cores} cores"
    hbm = "" if machine.hbm_bytes_per_core is None else f" of {machine.hbm_bytes_per_core >> 30} GiB each"
    devices = f"{machine.num_devices} device{'s' if machine.num_devices > 1 else ''}"
    host = word_size(psutil.virtual_memory().total)
    yield MachineFinding(
        level=Level.OK, subject="machine", found=f"{name}: {devices}{cores}{hbm}; host {host}"
    )


def _look_at_versions() -> Iterator[MachineFinding]:
    versions = library_versions()
    yield MachineFinding(
        level=Level.OK,
        subject="versions",
        found=", ".join(f"{name} {version}" for name, version in versions.items()),
    )
    torch_line, xla_line = (_minor(versions.get(name)) for name in ("torch", "torch_xla"))
    if xla_line is not None and torch_line != xla_line:
        yield MachineFinding(
            level=Level.FAIL,
            subject="versions",
            found=f"torch {versions['torch']} and torch_xla {versions['torch_xla']} do not go together",
            next_step=f"Install torch {xla_line}, or the torch_xla of torch {torch_line}.",
        )


def _minor(version: str | None) -> str | None:
    return None if version is None else ".".join(version.split("+")[0].split(".")[:2])


def _look_at_backends(machine: Machine, backend: str) -> tuple[Backend | None, list[MachineFinding]]:
    """The backend that a run would take, and what there is to say of it and of the others."""
    findings: list[MachineFinding] = []
    chosen: Backend | None = None
    try:
        chosen = choose_backend(backend)
        findings.append(
            MachineFinding(level=Level.OK, subject="backend", found=f"{chosen}: {chosen.description}")
        )
    except (BackendError, MissingExtraError) as error:
        findings.append(
            MachineFinding(
                level=Level.FAIL,
                subject="backend",
                found=f"{error.what}: {error.found}" if error.found else error.what,
                next_step=error.next_step or "",
            )
        )
    if machine.num_devices and chosen is not None and not chosen.is_neuron:
        wanted = Backend.NEURON if machine.has_native_backend else Backend.NEURON_XLA
        findings.append(_why_not(wanted))
    return chosen, findings


def _why_not(backend: Backend) -> MachineFinding:
    """Why a machine with devices would not compute on them."""
    try:
        choose_backend(str(backend))
        why, next_step = "another backend was asked for", f"--backend {backend} computes on the devices."
    except (BackendError, MissingExtraError) as error:
        why, next_step = error.found or error.what, "Run in the Neuron SDK's virtual environment."
    return MachineFinding(
        level=Level.WARN,
        subject="backend",
        found=f"nothing would run on this machine's Neuron devices: {why}",
        next_step=next_step,
    )


def _look_at_environment(machine: Machine) -> Iterator[MachineFinding]:
    variables = numeric_environment()
    found_any = False
    for name, value in variables.items():
        setting = _SETTINGS.get(name)
        if setting is not None and setting.changes(value):
            found_any = True
            yield MachineFinding(
                level=setting.level,
                subject="environment",
                found=f"{name}={value} {setting.effect}",
                next_step=setting.next_step,
            )
    if machine.num_devices and variables.get("PJRT_DEVICE", "NEURON") != "NEURON":
        found_any = True
        yield MachineFinding(
            level=Level.FAIL,
            subject="environment",
            found=f"PJRT_DEVICE={variables['PJRT_DEVICE']} keeps torch_xla off the Neuron devices",
            next_step="Unset it.",
        )
    if not found_any:
        others = ", ".join(f"{name}={value}" for name, value in variables.items())
        yield MachineFinding(
            level=Level.OK,
            subject="environment",
            found="no variable changes what is computed" + (f" (set: {others})" if others else ""),
        )


def _look_at_cache(root: Path) -> MachineFinding:
    """Whether compiled graphs outlive a run."""
    place = os.environ.get(_CACHE_VARIABLE, "")
    if place.startswith("s3://"):
        return MachineFinding(level=Level.OK, subject="compile cache", found=f"{place}: not looked into")
    folder = Path(place.removeprefix("file://")) if place else root / _DEFAULT_CACHE
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        # Permissions alone do not tell: a file system may be read-only.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return MachineFinding(
            level=Level.WARN,
            subject="compile cache",
            found=f"{folder} cannot be written to ({error.strerror}): every run compiles again",
            next_step=f"Set {_CACHE_VARIABLE} to a folder that can be written to, or to s3://….",
        )
    free = word_size(shutil.disk_usage(there).free)
    return MachineFinding(level=Level.OK, subject="compile cache", found=f"{folder}, {free} free")


def _look_at_device_memory(machine: Machine, spec: ModelSpec, dtype: torch.dtype) -> Iterator[MachineFinding]:
    """Whether a layer fits a core, and each of its tensors the runtime."""
    weights, head = layer_bytes(spec, dtype), vocabulary_bytes(spec, dtype)
    hbm = machine.hbm_bytes_per_core
    if hbm is not None:
        largest = max(weights, head)
        fits = largest <= hbm
        yield MachineFinding(
            level=Level.OK if fits else Level.FAIL,
            subject="device memory",
            found=f"a layer takes {word_size(weights)}, the lm_head {word_size(head)}, of {word_size(hbm)} on a core",
            next_step="" if fits else "Share it among cores with --tp-degree, or take a smaller dtype.",
        )
    gate_up = spec.num_local_experts * 2 * spec.intermediate_size * spec.hidden_size * dtype.itemsize
    largest_tensor = max(
        gate_up, head, *(math.prod(shape) * dtype.itemsize for shape in expected_layer_shapes(spec).values())
    )
    if largest_tensor > _MAX_TENSOR_BYTES:
        yield MachineFinding(
            level=Level.NOTE,
            subject="tensor size",
            found=f"gate and up of all experts in one tensor take {word_size(largest_tensor)}, over the 4 GiB that "
            "runtimes before SDK 2.28 allow",
            next_step="In a port, run experts in chunks, as mm2's own layer does, or share them with --tp-degree.",
        )


def _look_at_device_activations(machine: Machine, footprint: DeviceFootprint) -> Iterator[MachineFinding]:
    """Whether a core holds a layer and what it computes of a row of some length."""
    hbm = machine.hbm_bytes_per_core
    if hbm is None:
        return
    # What the host would take if it computed, the device takes.
    on_device = replace(footprint, backend=Backend.CPU)
    needed = on_device.layer_bytes + on_device.activation_bytes
    fits = needed <= hbm
    yield MachineFinding(
        level=Level.OK if fits else Level.FAIL,
        subject="device memory by length",
        found=f"a layer and what it computes of {footprint.inputs.sequence_length} tokens take about "
        f"{word_size(needed)}, of {word_size(hbm)} on a core",
        next_step="" if fits else "Share the layer among more ranks with --tp-degree, or run shorter rows.",
    )


def _look_at_time(profile: RunProfile, spec: ModelSpec, seq_len: int) -> MachineFinding:
    """What a row of a length takes, told from a run: what is computed grows with the length, loading does not."""
    measured = profile.batch_size * _layer_flops(spec, profile.sequence_length)
    usual = profile.usual
    run_s = usual.run_s * _layer_flops(spec, seq_len) / measured
    copy_back_s = usual.copy_back_s * seq_len / (profile.batch_size * profile.sequence_length)
    loading_s = usual.read_s + usual.regroup_s + usual.transfer_s
    layer_s = loading_s + run_s + copy_back_s
    all_s = word_duration(layer_s * spec.num_hidden_layers)
    return MachineFinding(
        level=Level.OK,
        subject="time",
        found=f"a row of {seq_len} tokens takes about {layer_s:.2f} s a layer ({loading_s:.2f} s to load, "
        f"{run_s:.2f} s to run) and {all_s} for {spec.num_hidden_layers} layers on {profile.backend}, "
        "compiling aside",
    )


def _layer_flops(spec: ModelSpec, seq_len: int) -> float:
    """Of one row through one layer all of whose experts see every token, as those of static shape do."""
    attention = 2 * spec.hidden_size * (2 * spec.query_width + 2 * spec.key_value_width)
    experts = 6 * spec.num_local_experts * spec.hidden_size * spec.intermediate_size
    return seq_len * (attention + experts + 4 * spec.query_width * seq_len)


def _look_at_host_memory(footprint: DeviceFootprint, free: int) -> MachineFinding:
    needed = footprint.layer_bytes + footprint.activation_bytes
    fits = needed <= free
    return MachineFinding(
        level=Level.OK if fits else Level.FAIL,
        subject="host memory",
        found=f"a layer and {footprint.inputs.sequence_length} tokens take {word_size(needed)}, "
        f"{word_size(free)} are free",
        next_step="" if fits else "Free memory, or run fewer or shorter rows.",
    )
