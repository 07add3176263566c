"""DividedTokens: the tokens of a prefill on vLLM Neuron, which its models divide among the ranks between attentions.

Each rank has the next T/ranks tokens of the bucket. In a decoding step each rank has all of them.
T tokens of the bucket, S columns of a prompt, H hidden.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from minimax_tools.errors import TargetError
from minimax_tools.machine.native_output import native_output_dropped
from neuron.devices.ranks import Ranks
from neuron.ports.packed_request import SMALLEST_BUCKET, PackedRequest, bucket_of

# Ranks may wait for long while the lead copies a checkpoint.
_TIMEOUT = timedelta(hours=2)


class DividedTokens:
    """The ranks' parts of a pass's tokens. All ranks make the same calls in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._num_tokens = 0  # T of the present pass, if it is divided
        # Apart from the collective calls of the port.
        self._group: Any = new_host_group() if ranks.are_several else None

    def begin(self, request: PackedRequest) -> None:
        """Note the tokens of the pass that comes next."""
        self._num_tokens = len(request.input_ids) if request.is_prefill else 0

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return [T,…] of all ranks' parts, on the CPU; a tensor that is no part is returned as it is."""
        degree = self.ranks.degree
        if not self.ranks.are_several or tensor.ndim == 0 or tensor.shape[0] * degree != self._num_tokens:
            return tensor
        part = tensor.to("cpu").contiguous()
        parts = [torch.empty_like(part) for _ in range(degree)]
        # As bytes: gloo does not know every dtype.
        torch.distributed.all_gather(
            [one.view(torch.uint8) for one in parts], part.view(torch.uint8), group=self._group
        )
        return torch.cat(parts)

    def cut(self, states: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of states [1,S,H], padded with zeros to their bucket: [1,T/ranks,H]."""
        if not self.ranks.are_several:
            return states
        padded = states.new_zeros((1, bucket_of(states.shape[1]), states.shape[2]))
        padded[:, : states.shape[1]] = states
        return padded.chunk(self.ranks.degree, dim=1)[self.ranks.rank]


def new_host_group() -> Any:
    """Open a group of all ranks for tensors on the host; every rank makes the call."""
    with native_output_dropped():
        return torch.distributed.new_group(backend="gloo", timeout=_TIMEOUT)


def refuse_uneven(ranks: Ranks) -> None:
    """Raise TargetError if the ranks cannot divide the smallest bucket of a prefill."""
    if SMALLEST_BUCKET % ranks.degree:
        raise TargetError(
            f"{ranks.degree} ranks do not divide a prefill of {SMALLEST_BUCKET} tokens",
            expected=f"a --tp-degree that divides {SMALLEST_BUCKET}",
            found=str(ranks.degree),
            next_step="The plugin gives each rank the same number of tokens.",
        )
