"""LayerLoader: reads a golden's layers, one after the other, into storage that is used again for every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from minimax_tools.checkpoint.filling import Filling, ReadingPool
from minimax_tools.checkpoint.layer_storage import PACKED_DTYPE, LayerStorage
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.weight_names import EXPERT_MATRICES, EXPERTS, expert_weight, layer_prefix, scale_name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LoadedLayer:
    """A layer in its storage, or on its way there."""

    layer: int
    storage: LayerStorage
    filling: Filling


class LayerLoader:
    """Fills one layer's storage after the other; with `prefetch`, two storages take turns.

    Whole layers are read past the page cache, because a pass needs each once. Single experts go through the cache:
    the next token may need them again.

    Args:
        reader: The checkpoint, its layers verified.
        new_storage: Makes the storage; called once, or twice with `prefetch`.
        prefetch: Fill the next layer's storage while the current layer is in use.
        num_threads: Number of reading threads. Default: two per core that torch computes with, so that some
            dequantise while others wait for the disk.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        new_storage: Callable[[], LayerStorage],
        *,
        prefetch: bool,
        num_threads: int | None = None,
    ) -> None:
        self._reader = reader
        self._new_storage = new_storage
        self._prefetch = prefetch
        self._pool = ReadingPool(num_threads or 2 * torch.get_num_threads())
        self._idle: list[LayerStorage] = []
        self._current: _LoadedLayer | None = None
        self._coming: _LoadedLayer | None = None

    @property
    def current(self) -> LayerStorage:
        """Storage of the layer that was loaded last."""
        assert self._current is not None, "no layer is loaded"
        return self._current.storage

    def load(self, layer: int, *, then: int | None = None) -> LayerStorage:
        """Fill the storage of a layer, and begin to prefetch layer `then`; storage returned before becomes invalid.

        Raises:
            CheckpointError: A tensor cannot be read.
        """
        self._retire_current()
        if self._coming is None or self._coming.layer != layer:
            self._drop_coming()
            self._coming = self._start(layer)
        # Cleared first: if reading fails, `_finish` makes the storage idle, and nothing else may refer to it.
        coming, self._coming = self._coming, None
        self._finish(coming)
        if self._prefetch and then is not None:
            self._coming = self._start(then)
        return coming.storage

    def load_without_experts(self, layer: int) -> LayerStorage:
        """Fill a layer's storage except its experts, which `load_experts` reads."""
        self._retire_current()
        self._drop_coming()
        storage = self._take_storage()
        names = [name for name in storage.places if EXPERTS not in name]
        filling = self._start_filling(layer, storage, names, self._reader)
        self._finish(_LoadedLayer(layer=layer, storage=storage, filling=filling))
        return storage

    def load_experts(self, experts: Iterable[int]) -> None:
        """Fill the places of some experts of the current layer."""
        assert self._current is not None, "experts belong to a layer that was loaded"
        weights = [expert_weight(expert, name) for expert in experts for name in EXPERT_MATRICES]
        names = (*weights, *(scale_name(weight) for weight in weights))
        layer, storage = self._current.layer, self._current.storage
        # Scales have places only in storage that keeps FP8 codes.
        names_placed = [name for name in names if name in storage.places]
        self._start_filling(layer, storage, names_placed, self._reader).finish()

    def keep_current(self) -> LayerStorage:
        """Give the current layer's storage to the caller for good; no other layer fills it."""
        storage, self._current = self.current, None
        return storage

    def release(self) -> None:
        """Free all storage; the next `load` allocates again."""
        self._drop_coming()
        self._current = None
        self._idle.clear()

    def close(self) -> None:
        """Free all storage and end the threads."""
        self.release()
        self._pool.close()

    def __enter__(self) -> LayerLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _retire_current(self) -> None:
        """Make the current storage idle, after the device's last computation with it."""
        if self._current is not None:
            # All places of a storage lie on one device.
            device = next(iter(self.current.places.values())).device
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            self._idle.append(self.keep_current())

    def _drop_coming(self) -> None:
        """Stop reading a prefetched layer, and make its storage idle."""
        if self._coming is not None:
            self._coming.filling.abandon()
            self._idle.append(self._coming.storage)
            self._coming = None

    def _take_storage(self) -> LayerStorage:
        return self._idle.pop() if self._idle else self._new_storage()

    def _start(self, layer: int) -> _LoadedLayer:
        storage = self._take_storage()
        filling = self._start_filling(layer, storage, storage.places, self._reader.past_cache())
        return _LoadedLayer(layer=layer, storage=storage, filling=filling)

    def _finish(self, coming: _LoadedLayer) -> None:
        """Wait until the layer is in its storage, and make it the current one."""
        try:
            coming.filling.finish()
        except BaseException:
            self._idle.append(coming.storage)
            raise
        self._current = coming

    def _start_filling(
        self, layer: int, storage: LayerStorage, names: Iterable[str], reader: CheckpointReader
    ) -> Filling:
        """Begin to read tensors of a layer, by relative name, into their places."""
        index, prefix = reader.index, layer_prefix(layer)
        # A disk reads fastest from front to back.
        ordered = sorted((prefix + name for name in names), key=lambda name: index[name].position)
        places = {name: storage.places[name.removeprefix(prefix)] for name in ordered}
        return self._pool.fill(places, partial(_read_into_place, reader))


def _read_into_place(reader: CheckpointReader, name: str, place: torch.Tensor) -> None:
    if place.dtype != PACKED_DTYPE:
        reader.read_weight_into(name, place)
    elif place.device.type == "cpu":
        reader.read_into(name, place)
    else:
        # `read_into` fills host memory only.
        place.copy_(reader.read(name))
