"""Machine check: findings about this machine before a golden is made on it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gpu_reference.certification.certifier import find_broken_versions
from gpu_reference.readiness.golden_way import GoldenWay, GpuMachine, Job
from minimax_tools.checkpoint.index import TensorIndex, find_absent_shards
from minimax_tools.checkpoint.layer_faults import describe_rounded_router, verify_layer
from minimax_tools.errors import (
    EXTRA_REQUIREMENTS,
    CheckpointError,
    format_count,
    install_command,
    list_names,
)
from minimax_tools.machine.finding import Level, MachineFinding
from minimax_tools.machine.size import format_size
from minimax_tools.model.span import word_layers
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import library_versions, numeric_environment

# Driver of NVIDIA, as its module says; below the root folder.
_DRIVER = "proc/driver/nvidia/version"
_DRIVER_VERSION = re.compile(r"Kernel Module.*?\s(\d+(?:\.\d+)+)")
# Sizes of the measurements: of a file, and of a matrix.
_READ_BYTES = 256 << 20
_MATRIX_WIDTH = 1024
# The fastest counts: the first call makes threads, and others may use the machine.
_NUM_PRODUCTS = 4
_PACKAGE = re.compile(r"[A-Za-z0-9_-]+")
_MAX_NAMED = 3
_TF32 = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def check_machine(
    machine: GpuMachine, job: Job, *, folder: Path | None, captures: Path, root: Path = Path("/")
) -> tuple[MachineFinding, ...]:
    """Return findings about this machine.

    Args:
        machine: This machine.
        job: The golden to make.
        folder: Checkpoint on this machine; None if it is on a hub, or not named.
        captures: Folder that the golden goes to.
        root: The file system's root.
    """
    return (
        *check_gpus(machine, root),
        *_check_versions(),
        *_check_environment(),
        *(() if folder is None else _check_shards(folder, job.footprint.spec)),
        _check_disk(job, captures),
    )


def check_ways(ways: Sequence[GoldenWay]) -> MachineFinding:
    """Return the finding whether a golden can be made in one of the ways, and in which."""
    working = [way for way in ways if way.works]
    if not working:
        least = min(ways, key=lambda way: way.needed_bytes)
        return MachineFinding(
            Level.FAIL,
            "memory",
            f"no way fits: {least.name} takes {format_size(least.needed_bytes)} of {format_size(least.room_bytes)}",
            "Free memory, give fewer tokens (--seq-len), or share the work among boxes: docs/splitting.md.",
        )
    names = "; ".join(way.name for way in working)
    return MachineFinding(
        Level.OK, "memory", f"{format_count(len(working), 'way')} of {len(ways)} fit: {names}"
    )


def measure_disk(folder: Path) -> float | None:
    """Measure how fast a checkpoint's largest file is read past the page cache, in bytes per second; None if small."""
    files = [path for path in folder.glob("*.safetensors") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size, default=None)
    if largest is None or largest.stat().st_size < _READ_BYTES or not hasattr(os, "posix_fadvise"):
        return None
    with largest.open("rb", buffering=0) as file:
        # The middle: what was just looked at, such as headers, is at the beginning.
        start = (largest.stat().st_size - _READ_BYTES) // 2
        os.posix_fadvise(file.fileno(), start, _READ_BYTES, os.POSIX_FADV_DONTNEED)
        file.seek(start)
        began_s = time.perf_counter()
        remaining = _READ_BYTES
        while remaining > 0 and (piece := file.read(min(remaining, 16 << 20))):
            remaining -= len(piece)
        return _READ_BYTES / (time.perf_counter() - began_s)


def measure_cpu() -> float:
    """Measure float32 matrix products on the CPU, in operations per second."""
    matrix = torch.full((_MATRIX_WIDTH, _MATRIX_WIDTH), 0.5)
    fastest_s = float("inf")
    for _ in range(_NUM_PRODUCTS):
        began_s = time.perf_counter()
        matrix @ matrix
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
    return 2.0 * _MATRIX_WIDTH**3 / fastest_s


def check_gpus(machine: GpuMachine, root: Path) -> Iterator[MachineFinding]:
    """Yield findings about GPUs and their driver; `root` is the file system's root."""
    driver = _read_driver(root)
    built_for = torch.version.cuda
    if machine.gpus:
        free = ", ".join(
            f"{format_size(gpu.free_bytes)} of {format_size(gpu.total_bytes)}" for gpu in machine.gpus
        )
        yield MachineFinding(Level.OK, "GPUs", f"{machine}; free: {free}")
        yield MachineFinding(
            Level.OK, "driver", f"{driver or 'unknown'}; torch {torch.__version__} for CUDA {built_for}"
        )
        in_use = [index for index, gpu in enumerate(machine.gpus) if gpu.free_bytes < 0.9 * gpu.total_bytes]
        if in_use:
            yield MachineFinding(
                Level.NOTE,
                "GPUs",
                f"in use by others: {', '.join(f'GPU {index}' for index in in_use)}",
                "nvidia-smi shows by whom. Or leave them out with CUDA_VISIBLE_DEVICES.",
            )
        return
    if driver is not None:
        reason = (
            "torch is built without CUDA" if built_for is None else f"torch is built for CUDA {built_for}"
        )
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason = f"CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else reason
        yield MachineFinding(
            Level.WARN,
            "GPUs",
            f"driver {driver} is here, and torch {torch.__version__} sees no GPU: {reason}",
            "Install a torch that fits the driver, or set CUDA_VISIBLE_DEVICES. Else the golden runs on the CPU.",
        )
        return
    yield MachineFinding(Level.NOTE, "GPUs", f"{machine}: the golden runs on the CPU")


def _read_driver(root: Path) -> str | None:
    try:
        match = _DRIVER_VERSION.search((root / _DRIVER).read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if match is None else match[1]


def _check_versions() -> Iterator[MachineFinding]:
    versions = library_versions()
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield MachineFinding(Level.OK, "versions", shown)
    for broken in find_broken_versions(versions):
        yield MachineFinding(Level.FAIL, "versions", broken, f"Upgrade: {install_command('golden')}")
    absent = [name for name in _golden_packages() if not _is_installed(name)]
    if absent:
        yield MachineFinding(
            Level.FAIL,
            "versions",
            f"not installed: {', '.join(absent)}",
            f"Install with: {install_command('golden')}",
        )


def _golden_packages() -> list[str]:
    names = (_PACKAGE.match(requirement) for requirement in EXTRA_REQUIREMENTS["golden"])
    return [match[0] for match in names if match is not None]


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _check_environment() -> Iterator[MachineFinding]:
    variables = numeric_environment()
    for name in _TF32:
        if variables.get(name, "0") not in ("", "0"):
            yield MachineFinding(
                Level.WARN,
                "environment",
                f"{name}={variables[name]} rounds float32 products to TF32, the float32 twins' too",
                "Unset it.",
            )


def _check_shards(folder: Path, spec: ModelSpec) -> Iterator[MachineFinding]:
    absent = find_absent_shards(folder)
    if absent:
        yield MachineFinding(
            Level.WARN,
            "shards",
            f"{folder} lacks {format_count(len(absent), 'shard')}: {list_names(list(absent), most=_MAX_NAMED)}",
            "Fetch them. Without them only the layers that are here can run.",
        )
        return
    number = len(list(folder.glob("*.safetensors")))
    if not number:
        return
    try:
        index = TensorIndex.from_folder(folder)
        for layer in range(spec.num_hidden_layers):
            verify_layer(index, spec, layer)
    except CheckpointError as error:
        yield MachineFinding(Level.FAIL, "shards", f"{error.what}: {error.found}", error.next_step or "")
        return
    further = [layer for layer in index.layers if layer >= spec.num_hidden_layers]
    unread = (
        f", and tensors of {word_layers(further)} beyond config.json, which are not read" if further else ""
    )
    yield MachineFinding(Level.OK, "shards", f"all {number} are in {folder}{unread}")
    if rounded := describe_rounded_router(index.entries, spec.graph):
        yield MachineFinding(Level.WARN, "router", rounded, "Take gate and correction bias of the original.")


def _check_disk(job: Job, captures: Path) -> MachineFinding:
    existing = next(parent for parent in (captures, *captures.absolute().parents) if parent.exists())
    free, needed = shutil.disk_usage(existing).free, job.capture_bytes
    found = f"the golden takes about {format_size(needed)} at {captures}, {format_size(free)} are free"
    if needed > free:
        return MachineFinding(
            Level.FAIL,
            "disk",
            found,
            "Choose another disk with --captures, or --noise-floor stats or --sites layer.",
        )
    return MachineFinding(Level.OK, "disk", found)
