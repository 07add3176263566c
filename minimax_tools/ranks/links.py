"""Links: the process group through which tensors go from rank to rank.

RankMessages: Python values sent from rank 0, the lead, to all other ranks, and gathered from them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from minimax_tools.machine.native_output import native_output_dropped
from minimax_tools.ranks.rank_place import RankPlace
from minimax_tools.ranks.watch import BackgroundCall

# The lead may read, write and judge for long while the others wait. A dead lead closes its connections, which the
# others notice at once.
_MESSAGE_TIMEOUT = timedelta(hours=2)


class RankMessages:
    """Messages between the ranks of a run. A single rank sends to nobody.

    They go through their own gloo group, apart from the collective calls of a port. Values are pickled.
    """

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self.group: Any = None  # the gloo group; None before `open`, and with a single rank

    def open(self) -> None:
        """Open the group, on all ranks; torch's process group must be up."""
        if self._num_ranks > 1:
            with native_output_dropped():
                self.group = torch.distributed.new_group(backend="gloo", timeout=_MESSAGE_TIMEOUT)

    def send(self, message: Any) -> None:
        """Send a value from the lead to all other ranks, each of which calls `receive`."""
        if self._num_ranks > 1:
            torch.distributed.broadcast_object_list([message], src=0, group=self.group)

    def receive(self) -> Any:
        """Wait for the lead's next value, on another rank, and return it."""
        messages = [None]
        torch.distributed.broadcast_object_list(messages, src=0, group=self.group)
        return messages[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on the lead; [] on the other ranks. All ranks call it."""
        if self._num_ranks == 1:
            return [value]
        values = [None] * self._num_ranks if self._rank == 0 else None
        torch.distributed.gather_object(value, values, dst=0, group=self.group)
        return values or []


# As good as no limit: a rank waits as long as those before it compute. If one dies, the run's `Watch` tells, and
# nobody waits for the thread.
_TIMEOUT = timedelta(days=30)


class Links:
    """The process group, as one rank sees it. `connect` and `close` block; transfers run in threads of their own.

    Transfers have no order among themselves: two tensors to one rank may overtake each other. So begin a transfer with
    a rank only when the one before with that rank is over.

    Args:
        place: Number of this rank, and number of ranks.
        device: Device that this rank computes on.
        is_direct: Whether every rank has its own GPU. If so, tensors go from GPU to GPU (nccl), else through the host
            (gloo).
    """

    def __init__(self, place: RankPlace, device: torch.device, *, is_direct: bool) -> None:
        self._place = place
        self._device = device
        self._is_direct = is_direct
        # Device of tensors on their way.
        self._wire = device if is_direct else torch.device("cpu")

    def connect(self, store: Any) -> None:
        """Open the process group, on all ranks; `store` is a connection of its own: nccl may block within it."""
        if self._is_direct:
            # The `Watch` reports a dead rank; nccl's own guard would end this process without a word.
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
        """Begin to receive a tensor. It is the result of the call, on this rank's device."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._wire)
        fill = self._on_wire(lambda: torch.distributed.recv(tensor, source))

        def receive() -> torch.Tensor:
            fill()
            return tensor.to(self._device)

        return BackgroundCall(receive)

    def close(self) -> None:
        """Close the process group if it is open."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _on_wire(self, call: Callable[[], object]) -> Callable[[], object]:
        """Let a call of nccl run in its own stream, so that no computation on the GPU waits for another rank."""
        if not self._is_direct:
            return call
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))

        def run() -> None:
            with torch.cuda.stream(stream):
                call()
            # Wait until the tensor has been sent or received: `call` keeps it alive until then.
            stream.synchronize()

        return run


def identify_gpu(device: torch.device) -> str | None:
    """Return the id that tells a GPU from all others, so that ranks see whether they share one; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
