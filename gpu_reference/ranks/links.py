"""Links: the process group of a run, through which hidden states go from rank to rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from gpu_reference.ranks.background_call import Errand
from gpu_reference.ranks.rank_place import RankPlace

# Hidden states may be waited for as long as the ranks before need: it is the watch that ends a wait.
_TIMEOUT = timedelta(days=30)


class Links:
    """The process group, as one rank sees it; its calls block, and are made in threads (see `Errand`).

    Args:
        place: This rank's.
        device: What it computes on.
        is_direct: Whether every rank has a GPU of its own, so that tensors go from one to the other (nccl); else
            they go through the host (gloo).
    """

    def __init__(self, place: RankPlace, device: torch.device, *, is_direct: bool) -> None:
        self._place = place
        self._device = device
        self._is_direct = is_direct

    def connect(self, store: Any) -> None:
        """Find the other ranks; all must call.

        Args:
            store: torch.distributed's, a connection of its own: nccl waits in it.
        """
        if self._is_direct:
            # A rank that died is told of by the watch; nccl's own guard would end this process without a word.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            torch.cuda.set_device(self._device)
        torch.distributed.init_process_group(
            "nccl" if self._is_direct else "gloo",
            store=store,
            rank=self._place.rank,
            world_size=self._place.num_ranks,
            timeout=_TIMEOUT,
        )

    def send(self, tensor: torch.Tensor, *, to: int) -> Errand:
        """Begin to pass a tensor on, behind what this thread gave the device to do; it must not change any more."""
        tensor = tensor.detach().to(self._wire).contiguous()
        return Errand(self._on_wire(lambda: torch.distributed.send(tensor, to)))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, *, source: int) -> Errand:
        """Begin to take a tensor; the errand's result is it, on this rank's device."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._wire)
        take = self._on_wire(lambda: torch.distributed.recv(tensor, source))

        def call() -> torch.Tensor:
            take()
            return tensor.to(self._device)

        return Errand(call)

    def close(self) -> None:
        """Leave the group, where it was entered."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @property
    def _wire(self) -> torch.device:
        """Where tensors are that travel."""
        return self._device if self._is_direct else torch.device("cpu")

    def _on_wire(self, call: Callable[[], object]) -> Callable[[], object]:
        """A call of nccl's on a stream of its own: what the GPU computes meanwhile does not wait for the other rank."""
        if not self._is_direct:
            return call
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))

        def run() -> None:
            with torch.cuda.stream(stream):
                call()
            # The tensor lives until then: `call` holds it.
            stream.synchronize()

        return run


def identify_gpu(device: torch.device) -> str | None:
    """What tells one GPU from all others; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
