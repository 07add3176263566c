"""GoldenWay: a way to make a golden on a machine: its options, whether it fits, and about how long it takes.

Times are estimates: the bytes of the checkpoint at the disk's speed, and the arithmetic of the model, its float32 twins
and variants at the device's. Where a layer is read while another runs, the longer of the two counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_reference.model.footprint import Footprint
from minimax_tools.errors import UsageError
from minimax_tools.machine.memory import available_bytes
from minimax_tools.machine.size import format_size, parse_size
from minimax_tools.model.spec import ModelSpec

_GPUS = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(.+)")
# Memory of a machine that is described by its GPUs alone.
_USUAL_HOST_BYTES = 64 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU."""

    name: str  # empty if it is described
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMachine:
    """A machine that may make a golden."""

    gpus: tuple[Gpu, ...]
    host_bytes: int  # memory of the host that can be taken
    is_here: bool  # False if it is described

    @classmethod
    def current(cls, *, root: Path = Path("/")) -> GpuMachine:
        """Look at this machine; `root` is the file system's root."""
        gpus = []
        for index in range(torch.cuda.device_count()):
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            gpus.append(
                Gpu(name=torch.cuda.get_device_name(index), total_bytes=total_bytes, free_bytes=free_bytes)
            )
        return cls(gpus=tuple(gpus), host_bytes=available_bytes(root=root), is_here=True)

    @classmethod
    def parse(cls, gpus: str, host_bytes: int | None) -> GpuMachine:
        """Read a description: `8x80GB`, `24GB` or `0` GPUs; `host_bytes` is the memory of the host, None for 64 GB.

        Raises:
            UsageError: It cannot be read.
        """
        host_bytes = host_bytes or _USUAL_HOST_BYTES
        if gpus.strip() in ("0", "none"):
            return cls(gpus=(), host_bytes=host_bytes, is_here=False)
        match = _GPUS.fullmatch(gpus.strip())
        try:
            size_bytes = 0 if match is None or match[1] == "0" else parse_size(match[2])
        except ValueError:
            size_bytes = 0
        if match is None or not size_bytes:
            raise UsageError(f"--gpus {gpus!r} cannot be read", expected="0, 24GB or 8x80GB")
        gpu = Gpu(name="", total_bytes=size_bytes, free_bytes=size_bytes)
        return cls(gpus=(gpu,) * int(match[1] or 1), host_bytes=host_bytes, is_here=False)

    def __str__(self) -> str:
        host = f"{format_size(self.host_bytes)} of memory"
        if not self.gpus:
            return f"no GPU, {host}"
        sizes = [gpu.total_bytes for gpu in self.gpus]
        names = {gpu.name for gpu in self.gpus if gpu.name}
        named = f" {', '.join(sorted(names))}" if names else ""
        same = len(set(sizes)) == 1
        gpus = (
            f"{len(sizes)} ×{named} {format_size(sizes[0])}" if same else ", ".join(map(format_size, sizes))
        )
        return f"{gpus}, {host}"


# Taken of each GPU by CUDA's context and its libraries' buffers.
_CONTEXT_BYTES = 10**9
# Share of the host's free memory to plan with, as `--max-memory` does.
_HOST_SHARE = 0.9
_GB = 10**9
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Rates that a time is estimated by."""

    disk_bytes_per_s: float
    is_disk_known: bool  # whether the disk was measured or named, and is not assumed
    gpu_flops_per_s: float  # of float32 matrix products
    cpu_flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenWay:
    """A way to make a golden on a machine."""

    name: str
    options: tuple[str, ...]  # of mm2-gpu extract-all, beside --model
    works: bool
    num_layers_held: int  # layers in memory at once, at most those that fit
    needed_bytes: int  # on the GPUs, or on the host if there is no GPU
    room_bytes: int  # of that memory
    needed_host_bytes: int  # on the host of a machine with GPUs; 0 if it needs little
    time_s: float | None  # None if it does not work


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A golden to make: its memory, its bytes on the disk and its arithmetic."""

    footprint: Footprint
    stored_bytes: int  # of the checkpoint

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.footprint.num_layers

    @property
    def flops(self) -> float:
        """Operations of the model, its float32 twins and variants, for all tokens."""
        num_passes = 2 + len(self.footprint.floor_variants)
        num_tokens = self.footprint.inputs.input_ids.numel()
        return num_passes * num_tokens * self.num_layers * _layer_flops(self.footprint.spec)

    @property
    def capture_bytes(self) -> int:
        """Bytes of the capture on the disk: sites and logits with their float32 twins; the floors are small."""
        footprint = self.footprint
        num_logits = footprint.inputs.input_ids.numel() * footprint.spec.vocab_size
        num_values = self.num_layers * footprint.site_values + num_logits
        has_twins = footprint.dtype.itemsize < _FLOAT32_BYTES
        return num_values * (footprint.dtype.itemsize + (_FLOAT32_BYTES if has_twins else 0))


def find_ways(machine: GpuMachine, job: Job, speeds: Speeds) -> tuple[GoldenWay, ...]:
    """Return every way to make a golden on a machine, the fastest kind first, with those that do not work."""
    return tuple(_whole_ways(machine, job, speeds)) + tuple(_streamed_ways(machine, job, speeds))


def layers_on_gpus(machine: GpuMachine, job: Job, *, spare_bytes: int = 0) -> int:
    """Return how many layers the GPUs hold beside activations, with `spare_bytes` of each GPU left free.

    Embedding and lm_head are on the first and the last.
    """
    footprint = job.footprint
    held = 0
    for index, gpu in enumerate(machine.gpus):
        room = gpu.free_bytes - _reserve_bytes(job) - spare_bytes
        is_end = index in (0, len(machine.gpus) - 1)
        num_ends = (2 if len(machine.gpus) == 1 else 1) if is_end else 0
        held += max(0, (room - num_ends * footprint.vocabulary_bytes) // footprint.layer_bytes)
    return min(held, job.num_layers)


def _whole_ways(machine: GpuMachine, job: Job, speeds: Speeds) -> Iterator[GoldenWay]:
    footprint, num_layers = job.footprint, job.num_layers
    weights = num_layers * footprint.layer_bytes + 2 * footprint.vocabulary_bytes
    host_room = int(machine.host_bytes * _HOST_SHARE)
    read_s = job.stored_bytes / speeds.disk_bytes_per_s
    if not machine.gpus:
        needed = footprint.loading_bytes + footprint.activation_bytes + footprint.logits_bytes
        works = needed <= host_room
        yield GoldenWay(
            name="whole on the CPU",
            options=("--stream", "off", "--device-map", "cpu"),
            works=works,
            num_layers_held=num_layers if works else 0,
            needed_bytes=needed,
            room_bytes=host_room,
            needed_host_bytes=0,
            time_s=read_s + job.flops / speeds.cpu_flops_per_s if works else None,
        )
        return
    held = layers_on_gpus(machine, job)
    room = sum(gpu.free_bytes for gpu in machine.gpus)
    needed = weights + len(machine.gpus) * _reserve_bytes(job)
    time_s = read_s + job.flops / speeds.gpu_flops_per_s
    yield GoldenWay(
        name="whole on the GPUs",
        options=_whole_options(machine, job, spare_bytes=0),
        works=held == num_layers,
        num_layers_held=held,
        needed_bytes=needed,
        room_bytes=room,
        needed_host_bytes=0,
        time_s=time_s if held == num_layers else None,
    )
    if held < num_layers:
        # accelerate copies a layer that is on the host to a GPU when it runs: that GPU keeps room for it.
        held = layers_on_gpus(machine, job, spare_bytes=footprint.layer_bytes)
        on_host = (num_layers - held) * footprint.layer_bytes
        fits = held > 0 and on_host <= host_room
        yield GoldenWay(
            name="whole, GPUs and host",
            options=_whole_options(machine, job, spare_bytes=footprint.layer_bytes),
            works=fits,
            num_layers_held=num_layers if fits else held,
            needed_bytes=needed - on_host + len(machine.gpus) * footprint.layer_bytes,
            room_bytes=room,
            needed_host_bytes=on_host,
            time_s=time_s if fits else None,
        )


def _whole_options(machine: GpuMachine, job: Job, *, spare_bytes: int) -> tuple[str, ...]:
    least_bytes = min(gpu.free_bytes for gpu in machine.gpus) - _reserve_bytes(job) - spare_bytes
    limit = f"{max(1, least_bytes // _GB)}GB"
    return ("--stream", "off", "--device-map", "auto", "--max-memory", limit)


def _streamed_ways(machine: GpuMachine, job: Job, speeds: Speeds) -> Iterator[GoldenWay]:
    footprint = job.footprint
    if machine.gpus:
        room, flops_per_s = machine.gpus[0].free_bytes, speeds.gpu_flops_per_s
        beside = _reserve_bytes(job)
    else:
        room, flops_per_s = int(machine.host_bytes * _HOST_SHARE), speeds.cpu_flops_per_s
        beside = footprint.activation_bytes
    # The lm_head runs when no layer is in memory; its logits are behind the layers too.
    head = footprint.vocabulary_bytes + footprint.logits_bytes
    read_s, run_s = job.stored_bytes / speeds.disk_bytes_per_s, job.flops / flops_per_s
    for name, options, prefetch, packed in (
        ("streamed, two layers", ("--prefetch",), True, False),
        ("streamed, one layer", ("--no-prefetch",), False, False),
        (
            "streamed, packed",
            ("--no-prefetch", "--packed-experts", "--experts-implementation", "eager"),
            False,
            True,
        ),
    ):
        needed = max(footprint.streamed_bytes(prefetch=prefetch, packed=packed), head) + beside
        # A layer is read into the host's memory before it goes to a GPU.
        on_host = footprint.streamed_bytes(prefetch=prefetch, packed=packed) if machine.gpus else 0
        works = needed <= room and on_host <= machine.host_bytes * _HOST_SHARE
        yield GoldenWay(
            name=name,
            options=("--stream", "on", *options),
            works=works,
            num_layers_held=(2 if prefetch else 1) if works else 0,
            needed_bytes=needed,
            room_bytes=room,
            needed_host_bytes=on_host,
            time_s=(max(read_s, run_s) if prefetch else read_s + run_s) if works else None,
        )


def _reserve_bytes(job: Job) -> int:
    """Return the bytes of a GPU that weights do not get: activations of a layer, and CUDA's context."""
    return job.footprint.activation_bytes + _CONTEXT_BYTES


def _layer_flops(spec: ModelSpec) -> float:
    """Return the operations for one token in one layer: two for each weight that it meets."""
    attention = 2 * spec.hidden_size * (spec.query_width + spec.key_value_width)
    experts = 3 * spec.num_experts_per_tok * spec.hidden_size * spec.intermediate_size
    router = spec.num_local_experts * spec.hidden_size
    return 2.0 * (attention + experts + router)
