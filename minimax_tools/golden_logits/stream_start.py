"""StreamStart: the golden's stream at the input of a layer, from which golden logits are computed.

The layers before have no part in such logits, and so none in their noise.
T tokens of a row, H hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

Row = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamStart:
    """The stream of some rows at the input of one layer, as every computed copy begins with it."""

    layer: int  # the number of layers stands for the input of the final norm
    states: Mapping[Row, torch.Tensor]  # by the row's token ids, [T,H]

    def digest(self) -> str:
        """Compute sha256 over the rows and their states."""
        digest = hashlib.sha256(f"layer {self.layer}\n".encode())
        for row, states_th in sorted(self.states.items()):
            digest.update(f"{row} {states_th.dtype} {list(states_th.shape)}\n".encode())
            digest.update(states_th.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def pad(self, rows: list[Row], *, num_columns: int) -> torch.Tensor:
        """Return the states of rows as a batch [B,S,H], padded with zeros on the right."""
        states = [self.states[row] for row in rows]
        batch = states[0].new_zeros((len(rows), num_columns, states[0].shape[-1]))
        for padded, states_th in zip(batch, states, strict=True):
            padded[: len(states_th)] = states_th
        return batch
