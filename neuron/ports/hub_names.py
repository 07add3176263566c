"""Hub names: a layer's or a model's tensors as a port gets them, by the names under which its family stores them.

mm2 has one name for each tensor in all families. A module or a conversion that sets `takes_own_names`, as mm2's own do,
gets the tensors by mm2's names.
"""

from __future__ import annotations

import torch

from minimax_tools.checkpoint.layer_tensors import CheckpointTensors
from minimax_tools.model.stored_names import StoredNames


class HubTensors(CheckpointTensors):
    """Tensors by the hub's names; `own` has them by mm2's, and is not changed by what is set or popped here.

    Like `own`, it reads a tensor at its access.
    """

    def __init__(self, own: CheckpointTensors, names: StoredNames) -> None:
        super().__init__(
            own.reader,
            prefix=own.prefix,
            dtype=own.dtype,
            present=dict.fromkeys(map(names.stored, own)),
            in_float32=tuple(map(names.stored, own.in_float32)),
        )
        self._own = own
        self._names = names

    def given_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the value that `[name]` gives."""
        return (
            self._own.given_dtype(self._names.own(name))
            if self.is_stored(name)
            else super().given_dtype(name)
        )

    def given_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the value that `[name]` gives."""
        return (
            self._own.given_shape(self._names.own(name))
            if self.is_stored(name)
            else super().given_shape(name)
        )

    def read_into(
        self, name: str, out: torch.Tensor, *, rows: range | None = None, columns: range | None = None
    ) -> None:
        """Fill `out` with the values of a tensor, or with those of some rows and columns, as `own` does."""
        if self.is_stored(name):
            self._own.read_into(self._names.own(name), out, rows=rows, columns=columns)
        else:
            super().read_into(name, out, rows=rows, columns=columns)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._own[self._names.own(name)] if self.is_stored(name) else super().__getitem__(name)


def hub_named(tensors: CheckpointTensors, names: StoredNames) -> CheckpointTensors:
    """Return tensors by the hub's names: the same object where these are mm2's."""
    return HubTensors(tensors, names) if names.translates else tensors


def takes_own_names(*owners: object) -> bool:
    """Decide whether one of a module, its class and its conversion takes weights by mm2's names."""
    return any(getattr(owner, "takes_own_names", False) for owner in owners)
