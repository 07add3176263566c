"""GpuMachine: GPUs and memory of this machine, or of one that is only described, such as one to rent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from minimax_tools.errors import UsageError
from minimax_tools.machine.memory import available_bytes
from minimax_tools.machine.size import format_size, parse_size

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
    def parse(cls, gpus: str, memory: str | None) -> GpuMachine:
        """Read a description: `8x80GB`, `24GB` or `0` GPUs, and the memory of the host.

        Raises:
            UsageError: It cannot be read.
        """
        host_bytes = _USUAL_HOST_BYTES if memory is None else _read_size(memory, option="--memory")
        if gpus.strip() in ("0", "none"):
            return cls(gpus=(), host_bytes=host_bytes, is_here=False)
        match = _GPUS.fullmatch(gpus.strip())
        if match is None or match[1] == "0":
            raise _unreadable(gpus, option="--gpus")
        size_bytes = _read_size(match[2], option="--gpus")
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


def _read_size(text: str, *, option: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise _unreadable(text, option=option) from None


def _unreadable(text: str, *, option: str) -> UsageError:
    expected = "0, 24GB or 8x80GB" if option == "--gpus" else "a size such as 1TB"
    return UsageError(f"{option} {text!r} cannot be read", expected=expected)
