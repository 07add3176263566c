"""The engine that fills storage from a checkpoint, for goldens and devices.

A parameter of a module is made of tensors of the checkpoint. Each tensor has a place: a view of the parameter's
storage, such as the rows of one expert, or a transposed matrix. Threads of a `ReadingPool` read each tensor into its
place. A weight, the value of a parameter to be filled, has one of three forms:

| form | filled by |
|---|---|
| a tensor | a copy, in the thread that loads the layer |
| `Deferred` | its own function, in that thread |
| `Gathered` | the threads of a pool, one tensor of the checkpoint each |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import torch

from minimax_tools.checkpoint.layer_tensors import CheckpointTensors
from minimax_tools.machine.compiled import CorePool

# Reads the tensor of a name into a place, and casts it to the place's dtype.
Read = Callable[[str, torch.Tensor], None]
# Places by the name of the tensor that belongs there.
Places = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """A weight that a function writes into its storage during loading."""

    shape: tuple[int, ...]
    # Writes it into a contiguous CPU tensor of `shape` and the parameter's dtype.
    fill: Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A weight made of tensors of the checkpoint."""

    shape: tuple[int, ...]
    read: Read  # reads one tensor; called from several threads
    places: Callable[[torch.Tensor], Places]  # divides storage of `shape` into places

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], read: Read) -> Gathered:
        """Return a weight that is a single tensor of the checkpoint."""
        return cls(shape=shape, read=read, places=lambda storage: {name: storage})

    def fill(self, storage: torch.Tensor) -> None:
        """Write the weight into a contiguous CPU tensor of its shape, in this thread."""
        for name, place in self.places(storage).items():
            self.read(name, place)


def unchanged(tensors: CheckpointTensors, name: str) -> torch.Tensor | Gathered:
    """Return a tensor of a layer, or of a model, as a weight.

    A port's `convert_state_dict` may have set a value in its place. One that is no tensor is returned as it is.
    """
    if not tensors.is_stored(name) and not isinstance(tensors[name], torch.Tensor):
        # Loading reports such a value together with all other faults.
        return tensors[name]
    return Gathered.whole(name, tensors.given_shape(name), tensors.read_into)


class Filling:
    """Storage that threads are filling."""

    def __init__(self, jobs: Sequence[Future[None]]) -> None:
        self._jobs = jobs

    def finish(self) -> None:
        """Wait for all tensors; raise the error of the first that failed, after all threads stopped writing."""
        try:
            for job in self._jobs:
                job.result()
        finally:
            # After an error other threads may still be writing.
            self.abandon()

    def abandon(self) -> None:
        """Read no further tensor, and wait for those under way: afterwards no thread touches the storage."""
        for job in self._jobs:
            job.cancel()
        wait(self._jobs)


class ReadingPool(CorePool):
    """Threads that read and dequantise, one tensor in each."""

    def __init__(self, num_threads: int) -> None:
        super().__init__("reading", num_threads)

    def fill(self, places: Places, read: Read) -> Filling:
        """Begin to read tensors into their places, in the order of `places`."""
        return self.start(partial(_read_into_place, read, name, place) for name, place in places.items())

    def start(self, jobs: Iterable[Callable[[], None]]) -> Filling:
        """Begin jobs that do not depend on each other."""
        return Filling([self.submit(job) for job in jobs])

    def close(self) -> None:
        """Drop jobs that have not begun, wait for the others, and end the threads."""
        self.shutdown(cancel_futures=True)

    def __exit__(self, *error: object) -> None:
        self.close()


def _read_into_place(read: Read, name: str, place: torch.Tensor) -> None:
    if place.device.type != "cuda":
        read(name, place)
        return
    # In a stream of its own the copy overlaps with the device's work.
    stream = torch.cuda.Stream(place.device)
    with torch.cuda.stream(stream):
        read(name, place)
    stream.synchronize()
