"""The engine that fills storage from a checkpoint, for goldens and devices.

A parameter of a module is made of tensors of the checkpoint. Each tensor has a place: a view of the parameter's
storage, such as the rows of one expert, or a transposed matrix. Threads of a `ReadingPool` read each tensor into its
place. A weight, the value of a parameter to be filled, has one of three forms:

| form | filled by |
|---|---|
| a tensor | a copy, in the thread that loads the layer |
| `Deferred` | its own function, in that thread |
| `Gathered` | the threads of a pool, one tensor of the checkpoint each |

The tensors of a whole model as a mapping, each read from the checkpoint at its access.

The `convert_state_dict` of a whole port gets this mapping; `LayerTensors` is the same for one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.machine.compiled import CorePool
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EMBEDDING, FINAL_NORM, LM_HEAD, layer_of, layer_prefix


class ModelTensors(MutableMapping[str, torch.Tensor]):
    """Tensors of a model by the hub's full names; `open` builds the mapping.

    FP8 is dequantised. Values come on the CPU in `dtype`, router gates and correction biases in float32. Tensors that
    were read are not kept; values that were set are.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        *,
        dtype: torch.dtype,
        outer: list[str],
        layers: dict[int, LayerTensors],
    ) -> None:
        self.dtype = dtype
        self._reader = reader
        # By full name; None for a tensor of the checkpoint outside the layers.
        self._outer: dict[str, torch.Tensor | None] = dict.fromkeys(outer)
        self._layers = layers

    @classmethod
    def open(
        cls, reader: CheckpointReader, spec: ModelSpec, dtype: torch.dtype, *, with_layers: bool = True
    ) -> ModelTensors:
        """Return the model's tensors after checking the headers of its layers; no data is read.

        `with_layers=False` leaves out the layers: embedding, final norm and lm_head remain.

        Raises:
            CheckpointError: A layer's tensors are missing, or of another shape than config.json says.
        """
        layers = range(spec.num_hidden_layers if with_layers else 0)
        return cls(
            reader,
            dtype=dtype,
            outer=[EMBEDDING, FINAL_NORM, *(() if spec.tie_word_embeddings else (LM_HEAD,))],
            layers={layer: LayerTensors.open(reader, spec, layer, dtype) for layer in layers},
        )

    def is_stored(self, name: str) -> bool:
        """Decide whether a tensor is read from the checkpoint: no value was set in its place."""
        tensors, short_name = self._owner(name)
        if tensors is not None:
            return tensors.is_stored(short_name)
        return name in self._outer and self._outer[name] is None

    def given_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the value that `[name]` gives."""
        tensors, short_name = self._owner(name)
        if tensors is not None:
            return tensors.given_shape(short_name)
        value = self._outer[name]
        return tuple(self._reader.index[name].shape if value is None else value.shape)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with the values of a tensor, cast to its dtype."""
        tensors, short_name = self._owner(name)
        if tensors is not None:
            tensors.read_into(short_name, out)
        elif (value := self._outer[name]) is not None:
            out.copy_(value)
        else:
            self._reader.read_weight_into(name, out)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensors, short_name = self._owner(name)
        if tensors is not None:
            return tensors[short_name]
        value = self._outer[name]
        return self._reader.read_weight(name, self.dtype) if value is None else value

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        tensors, short_name = self._owner(name)
        if tensors is not None:
            tensors[short_name] = value
        else:
            self._outer[name] = value

    def __delitem__(self, name: str) -> None:
        tensors, short_name = self._owner(name)
        if tensors is not None:
            del tensors[short_name]
        else:
            del self._outer[name]

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        tensors, short_name = self._owner(name)
        return name in self._outer if tensors is None else short_name in tensors

    def __iter__(self) -> Iterator[str]:
        yield from self._outer
        for layer, tensors in self._layers.items():
            yield from (layer_prefix(layer) + name for name in tensors)

    def __len__(self) -> int:
        return len(self._outer) + sum(len(tensors) for tensors in self._layers.values())

    def __repr__(self) -> str:
        return f"ModelTensors(dtype={self.dtype}, {len(self._layers)} layers, {len(self)} tensors)"

    def _owner(self, name: str) -> tuple[LayerTensors | None, str]:
        """Return the layer's tensors that hold a name, and its relative name; None for names outside the layers."""
        layer = layer_of(name)
        if layer is None or layer not in self._layers:
            return None, name
        return self._layers[layer], name.removeprefix(layer_prefix(layer))


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


def unchanged(tensors: LayerTensors | ModelTensors, name: str) -> torch.Tensor | Gathered:
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
