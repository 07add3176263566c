"""LayerLoader: layers read into storage that is kept, on all cores, the next one while this one computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType

import torch

from minimax_tools.checkpoint.layer_storage import PACKED_DTYPE, LayerStorage
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.reading_pool import Jobs, ReadingPool
from minimax_tools.model.weight_names import EXPERT_MATRICES, EXPERTS, expert_weight, layer_prefix, scale_name


class LayerLoader:
    """Fills one layer's storage after the other; with `prefetch`, two take turns.

    Tensors are read and dequantised one by one, each by one thread, straight into their places. Whole layers are read
    past the page cache, because their turn comes once; single experts, which every token may ask for again, are not.

    Args:
        reader: The checkpoint, its layers verified.
        new_storage: Makes the storage; called once, or twice with `prefetch`.
        prefetch: Whether to fill the next layer's storage while the current one is in use.
        num_threads: How many threads read; None for two on each core that torch computes with, so that some
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
        self._current: tuple[int, LayerStorage] | None = None
        self._coming: tuple[int, LayerStorage, Jobs] | None = None

    def load(self, layer: int, *, then: int | None = None) -> LayerStorage:
        """The layer's storage, filled; the one given before is filled anew from now on.

        Args:
            layer: The layer.
            then: The layer that will be asked for next, to be prefetched.

        Raises:
            CheckpointError: A tensor cannot be read.
        """
        self._retire()
        if self._coming is not None and self._coming[0] == layer:
            (_, storage, jobs), self._coming = self._coming, None
        else:
            self._drop_coming()
            storage = self._take_storage()
            jobs = self._start(layer, storage, storage.places, past_cache=True)
        self._finish(storage, jobs)
        self._current = (layer, storage)
        if self._prefetch and then is not None:
            following = self._take_storage()
            jobs = self._start(then, following, following.places, past_cache=True)
            self._coming = (then, following, jobs)
        return storage

    def load_without_experts(self, layer: int) -> LayerStorage:
        """The layer's storage with all but the experts filled; `load_experts` reads those that are needed."""
        self._retire()
        self._drop_coming()
        storage = self._take_storage()
        names = [name for name in storage.places if EXPERTS not in name]
        self._finish(storage, self._start(layer, storage, names, past_cache=False))
        self._current = (layer, storage)
        return storage

    def load_experts(self, experts: Iterable[int]) -> None:
        """Fill the places of some experts of the current layer."""
        assert self._current is not None, "experts belong to a layer that was loaded"
        layer, storage = self._current
        weights = [expert_weight(expert, name) for expert in experts for name in EXPERT_MATRICES]
        names = (*weights, *(scale_name(weight) for weight in weights))
        # Only storage that keeps FP8 as it is has places for scales.
        names_placed = [name for name in names if name in storage.places]
        self._pool.finish(self._start(layer, storage, names_placed, past_cache=False))

    @property
    def current(self) -> LayerStorage:
        """The storage of the layer that was loaded last."""
        assert self._current is not None, "no layer is loaded"
        return self._current[1]

    def keep_current(self) -> LayerStorage:
        """The current layer's storage, which is its caller's from now on: no layer fills it again."""
        storage, self._current = self.current, None
        return storage

    def release(self) -> None:
        """Give all storage back; the next `load` allocates anew."""
        self._drop_coming()
        self._current = None
        self._idle.clear()

    def close(self) -> None:
        """Give everything back and end the threads."""
        self.release()
        self._pool.close()

    def __enter__(self) -> LayerLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _retire(self) -> None:
        """What was current becomes idle: nothing may compute with it any more."""
        if self._current is not None:
            storage = self._current[1]
            device = next(iter(storage.places.values())).device
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            self._idle.append(storage)
            self._current = None

    def _take_storage(self) -> LayerStorage:
        return self._idle.pop() if self._idle else self._new_storage()

    def _start(self, layer: int, storage: LayerStorage, names: Iterable[str], *, past_cache: bool) -> Jobs:
        prefix, index = layer_prefix(layer), self._reader.index
        # A disk reads fastest from front to back.
        ordered = sorted(names, key=lambda name: index[prefix + name].position)
        fill = partial(self._fill, past_cache=past_cache)
        return self._pool.start(partial(fill, prefix + name, storage.places[name]) for name in ordered)

    def _finish(self, storage: LayerStorage, jobs: Jobs) -> None:
        try:
            self._pool.finish(jobs)
        except BaseException:
            # The storage may be filled anew: nothing must write to it any more.
            self._abandon(storage, jobs)
            raise

    def _drop_coming(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            self._abandon(coming[1], coming[2])

    def _abandon(self, storage: LayerStorage, jobs: Jobs) -> None:
        self._pool.abandon(jobs)
        self._idle.append(storage)

    def _fill(self, name: str, place: torch.Tensor, *, past_cache: bool) -> None:
        if place.device.type == "cuda":
            # A stream of its own: the copy runs beside what the device computes.
            stream = torch.cuda.Stream(place.device)
            with torch.cuda.stream(stream):
                self._fill_place(name, place, past_cache=past_cache)
            stream.synchronize()
        else:
            self._fill_place(name, place, past_cache=past_cache)

    def _fill_place(self, name: str, place: torch.Tensor, *, past_cache: bool) -> None:
        if place.dtype != PACKED_DTYPE:
            self._reader.read_weight_into(name, place, past_cache=past_cache)
        elif place.device.type == "cpu":
            self._reader.read_into(name, place, past_cache=past_cache)
        else:
            place.copy_(self._reader.read(name))
