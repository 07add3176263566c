from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch

from minimax_tools.machine.memory import MemoryUsage, give_back_freed_memory


@pytest.fixture
def freed_before() -> None:
    """Free what earlier tests left with the allocator, so that it is neither counted nor freed during this one."""
    give_back_freed_memory()


@pytest.fixture
def fill() -> Callable[[int], torch.Tensor]:
    """Makes a tensor of that many bytes, all written, in pages of its own, which are gone with it."""

    def make(num_bytes: int) -> torch.Tensor:
        # The allocator might take a hole that it keeps.
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE)
        return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)

    return make


@pytest.fixture
def usage() -> Callable[..., MemoryUsage]:
    """Makes up a memory usage from the bytes that matter to a test."""

    def make(
        anonymous: int, *, file: int = 0, most: int | None = None, gpu: int = 0, gpu_most: int = 0
    ) -> MemoryUsage:
        return MemoryUsage(
            anonymous_bytes=anonymous,
            file_bytes=file,
            most_resident_bytes=most,
            device_bytes={"cuda:0": gpu},
            most_device_bytes={"cuda:0": gpu_most},
        )

    return make
