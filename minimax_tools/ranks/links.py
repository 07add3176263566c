"""Links: the process group through which tensors go from rank to rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from minimax_tools.ranks.background_call import BackgroundCall
from minimax_tools.ranks.rank_place import RankPlace

# A rank may wait for a tensor as long as the ranks before it compute: the watch ends a wait, not this limit.
_TIMEOUT = timedelta(days=30)


class Links:
    """The process group, as one rank sees it. Its calls block, so they run in threads (`BackgroundCall`).

    Args:
        place: This rank's.
        device: The device that it computes on.
        is_direct: True where every rank has its own GPU: tensors then go from GPU to GPU (nccl), else through the
            host (gloo).
    """

    def __init__(self, place: RankPlace, device: torch.device, *, is_direct: bool) -> None:
        self._place = place
        self._device = device
        self._is_direct = is_direct
        # The device of tensors that travel.
        self._wire = device if is_direct else torch.device("cpu")

    def connect(self, store: Any) -> None:
        """Open the process group, on all ranks.

        Args:
            store: A connection to torch.distributed's store for this group alone: nccl waits in it.
        """
        if self._is_direct:
            # The watch reports a dead rank; nccl's own guard would end this process without a word.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            torch.cuda.set_device(self._device)
        torch.distributed.init_process_group(
            "nccl" if self._is_direct else "gloo",
            store=store,
            rank=self._place.rank,
            world_size=self._place.num_ranks,
            timeout=_TIMEOUT,
        )

    def send(self, tensor: torch.Tensor, *, to: int) -> BackgroundCall:
        """Begin to send a tensor, after the work that this thread queued on the device. Do not change it any more."""
        tensor = tensor.detach().to(self._wire).contiguous()
        return BackgroundCall(self._on_wire(lambda: torch.distributed.send(tensor, to)))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, *, source: int) -> BackgroundCall:
        """Begin to receive a tensor: the call's result, on this rank's device."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._wire)
        take = self._on_wire(lambda: torch.distributed.recv(tensor, source))

        def call() -> torch.Tensor:
            take()
            return tensor.to(self._device)

        return BackgroundCall(call)

    def close(self) -> None:
        """Close the process group, where it is open."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _on_wire(self, call: Callable[[], object]) -> Callable[[], object]:
        """Give a call of nccl's a stream of its own, so that no computation on the GPU waits for another rank."""
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
    """Return the id that tells a GPU from all others; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
