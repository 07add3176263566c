"""RankMessages: Python values sent from rank 0, the lead, to all other ranks, and gathered from them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from minimax_tools.machine.native_output import native_output_dropped

# The lead may read, write and judge for long while the others wait. A dead lead closes its connections, which the
# others notice at once.
_TIMEOUT = timedelta(hours=2)


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
                self.group = torch.distributed.new_group(backend="gloo", timeout=_TIMEOUT)

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
