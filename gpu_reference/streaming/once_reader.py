"""A checkpoint reader that reads announced tensors once, and records what it read."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader


class OnceReader(CheckpointReader):
    """A checkpoint reader that keeps announced tensors in memory until they are read again.

    A golden needs some tensors twice: norms and router for the model's fingerprint, and the first layer for its proof.
    `expect_again` announces them. The first read then keeps the tensor's bytes, and the second takes them from memory.
    Parts of a tensor are read from its file each time.
    """

    def __init__(self, folder: Path, *, index: TensorIndex) -> None:
        super().__init__(folder, index=index)
        # Reads still to come of each announced tensor, and the bytes of those that were read once.
        self._repeats: Counter[str] = Counter()
        self._kept: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._bytes_read: Counter[str] = Counter()
        # Threads that prefetch layers read at the same time.
        self._keeping = threading.Lock()

    @property
    def sizes_read(self) -> Mapping[str, int]:
        """Size in bytes of every tensor that was read, by name; each counts once."""
        return dict(self._sizes)

    @property
    def bytes_read_by_name(self) -> Mapping[str, int]:
        """Bytes read from the files, by tensor name; a tensor read twice counts twice."""
        return dict(self._bytes_read)

    def expect_again(self, names: Iterable[str]) -> None:
        """Announce, before they are read, tensors that will be read once more.

        A tensor that is announced and not read again stays in memory to the end.
        """
        with self._keeping:
            self._repeats.update(name for name in names if name in self.index)

    def _fill(self, entry: TensorEntry, out: torch.Tensor) -> None:
        """Fill `out` with the bytes of a tensor or of some of its rows, from memory if kept, else from its file."""
        whole = self.index[entry.name]
        with self._keeping:
            kept = self._kept.get(entry.name) if entry == whole else None
            if kept is not None:
                self._repeats[entry.name] -= 1
                if not self._repeats[entry.name]:
                    del self._kept[entry.name]
        if kept is not None:
            out.view(-1).view(torch.uint8).copy_(kept)
            return
        super()._fill(entry, out)
        with self._keeping:
            self._sizes[entry.name] = whole.size_bytes
            self._bytes_read[entry.name] += entry.size_bytes
            if self._repeats[entry.name] and entry == whole:
                self._kept[entry.name] = out.view(-1).view(torch.uint8).clone()
