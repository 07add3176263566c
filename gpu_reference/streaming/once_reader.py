"""OnceReader: a checkpoint's tensors, each read once however often it is asked for, and which those were."""

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
    """Keeps the stored bytes of what will be asked for again, as long as it will.

    A golden asks for some tensors several times: norms and router tell the model from others, and the first layer is
    proved against the checkpoint after it was loaded. What `expect_again` announced comes from memory then.

    Args:
        folder: The checkpoint folder.
        index: Its index; what is not in it cannot be read.
    """

    def __init__(self, folder: Path, *, index: TensorIndex) -> None:
        super().__init__(folder, index=index)
        self._repeats: Counter[str] = Counter()
        self._kept: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._bytes_read: Counter[str] = Counter()
        self._keeping = threading.Lock()

    @property
    def sizes_read(self) -> Mapping[str, int]:
        """Bytes of every tensor that was asked for, each counted once, by name."""
        return dict(self._sizes)

    @property
    def bytes_read_by_name(self) -> Mapping[str, int]:
        """Bytes that came from the files, by tensor: what was read twice counts twice."""
        return dict(self._bytes_read)

    def expect_again(self, names: Iterable[str]) -> None:
        """Announce, before they are read, that each of these will be asked for once more.

        What is announced and not asked for stays in memory to the end.
        """
        with self._keeping:
            self._repeats.update(name for name in names if name in self.index)

    def _fill(self, entry: TensorEntry, out: torch.Tensor) -> None:
        with self._keeping:
            kept = self._kept.get(entry.name)
            if kept is not None:
                self._repeats[entry.name] -= 1
                if not self._repeats[entry.name]:
                    del self._kept[entry.name]
        if kept is not None:
            out.view(-1).view(torch.uint8).copy_(kept)
            return
        super()._fill(entry, out)
        with self._keeping:
            self._sizes[entry.name] = entry.size_bytes
            self._bytes_read[entry.name] += entry.size_bytes
            if self._repeats[entry.name]:
                self._kept[entry.name] = out.view(-1).view(torch.uint8).clone()
