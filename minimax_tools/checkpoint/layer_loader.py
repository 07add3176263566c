"""LayerLoader: reads a golden's layers, one after the other, into storage that is used again for every layer.

Weights lie as transformers' decoder layer holds them, all experts in one tensor. Each tensor of the checkpoint has a
place there: a view that it is read into. Packed storage keeps experts as FP8 codes and scales, in half the memory.
E experts, H hidden, I intermediate, R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from minimax_tools.checkpoint.filling import Filling, ReadingPool
from minimax_tools.checkpoint.fp8 import dequantise
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.quantisation import scale_shape
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    EXPERT_DOWN,
    EXPERT_GATE,
    EXPERT_MATRICES,
    EXPERT_UP,
    EXPERTS,
    GATE,
    expected_layer_shapes,
    expert_weight,
    float32_names,
    layer_prefix,
    module_weights,
    scale_name,
)

# Names in transformers' decoder layer.
_GATE_UP_PROJ, _DOWN_PROJ = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# Dtype of a place that takes FP8 codes as the checkpoint stores them.
PACKED_DTYPE = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerStorage:
    """Storage of one layer's weights.

    The same memory is seen in three ways. `places` and `weights` go by the checkpoint's names, relative to the layer.
    """

    # To be filled: a place of `PACKED_DTYPE` takes a tensor's stored bytes, any other place the weight's values.
    places: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]  # to be read: in the run's dtype; router gate and bias in float32
    # To be bound: parameters, by the names of transformers' layer.
    modules: Mapping[str, torch.Tensor | PackedMatrices]


def grouped_storage(
    spec: ModelSpec, layer: int = 0, *, dtype: torch.dtype, device: torch.device
) -> LayerStorage:
    """Allocate a layer in `dtype`, its experts as `gate_up_proj` [E,2·I,H], gate rows first, and `down_proj` [E,H,I].

    A float32 router is float32. The storage serves all layers of one kind.
    """
    places, modules = _allocate_others(spec, layer, dtype=dtype, device=device)
    if not spec.graph.layer(layer).is_dense:
        num_experts, hidden, intermediate = spec.num_local_experts, spec.hidden_size, spec.intermediate_size
        gate_up = torch.empty(num_experts, 2 * intermediate, hidden, dtype=dtype, device=device)
        down = torch.empty(num_experts, hidden, intermediate, dtype=dtype, device=device)
        experts = range(num_experts)
        places |= gate_up_places(experts, gate_up, dtype=dtype) | down_places(experts, down, dtype=dtype)
        modules |= {_GATE_UP_PROJ: gate_up, _DOWN_PROJ: down}
    return LayerStorage(places=places, weights=places, modules=modules)


def packed_storage(
    spec: ModelSpec, layer: int = 0, *, dtype: torch.dtype, device: torch.device
) -> LayerStorage:
    """Allocate a layer whose experts stay FP8, codes and block scales, to be dequantised to `dtype` at each use.

    The checkpoint must store the experts in FP8. Other weights are as in `grouped_storage`.
    """
    places, modules = _allocate_others(spec, layer, dtype=dtype, device=device)
    if spec.graph.layer(layer).is_dense:
        return LayerStorage(places=places, weights=places, modules=modules)
    num_experts, hidden, intermediate = spec.num_local_experts, spec.hidden_size, spec.intermediate_size
    shapes = {
        EXPERT_GATE: (intermediate, hidden),
        EXPERT_UP: (intermediate, hidden),
        EXPERT_DOWN: (hidden, intermediate),
    }
    packed = {
        name: (
            torch.empty(num_experts, *shape, dtype=PACKED_DTYPE, device=device),
            torch.empty(num_experts, *scale_shape(shape), dtype=torch.float32, device=device),
        )
        for name, shape in shapes.items()
    }
    for expert in range(num_experts):
        for name, (codes, scales) in packed.items():
            places[expert_weight(expert, name)] = codes[expert]
            places[scale_name(expert_weight(expert, name))] = scales[expert]
    modules |= {
        _GATE_UP_PROJ: PackedMatrices((packed[EXPERT_GATE], packed[EXPERT_UP]), dtype=dtype),
        _DOWN_PROJ: PackedMatrices((packed[EXPERT_DOWN],), dtype=dtype),
    }
    return LayerStorage(places=places, weights=_Dequantised(places, dtype=dtype), modules=modules)


def gate_up_places(experts: range, out: torch.Tensor, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the places [I,H] of gate (w1) and up (w3) matrices in `out` [E,2·I,H], gate rows first, by name.

    `experts` are numbers in the order of the storage. For storage of transposed matrices, [E,H,2·I], give its view
    `.mT`.

    Raises:
        ValueError: The storage has another dtype or shape.
    """
    _check_storage(experts, out, dtype=dtype)
    if out.shape[1] % 2:
        raise ValueError(f"gate_up storage is {list(out.shape)}, expected gate and up rows of one height")
    # [E,2,I,H]: gate is part 0, up is part 1.
    matrices = out.unflatten(1, (2, -1))
    return {
        expert_weight(expert, name): matrices[index, part]
        for index, expert in enumerate(experts)
        for part, name in enumerate((EXPERT_GATE, EXPERT_UP))
    }


def down_places(experts: range, out: torch.Tensor, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the places [H,I] of down (w2) matrices in `out` [E,H,I], by name; see `gate_up_places`."""
    _check_storage(experts, out, dtype=dtype)
    return {expert_weight(expert, EXPERT_DOWN): out[index] for index, expert in enumerate(experts)}


class PackedMatrices:
    """Experts' matrices [E,R,C] as transformers' eager loop reads them: one at a time, by `[expert]`.

    A matrix is valid until the next access: all share one buffer. `parts` are FP8 codes and block scales of the parts
    that form the matrices, one below the other: gate and up, or down alone.
    """

    def __init__(self, parts: tuple[tuple[torch.Tensor, torch.Tensor], ...], *, dtype: torch.dtype) -> None:
        self._parts = parts
        codes = parts[0][0]
        num_rows = sum(codes.shape[1] for codes, _ in parts)
        self._matrix = torch.empty(num_rows, codes.shape[2], dtype=dtype, device=codes.device)

    def __len__(self) -> int:
        return len(self._parts[0][0])

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        index, start = int(expert), 0
        for codes, scales in self._parts:
            stop = start + codes.shape[1]
            dequantise(codes[index], scales[index], out=self._matrix[start:stop], dtype=self._matrix.dtype)
            start = stop
        return self._matrix


class _Dequantised(Mapping[str, torch.Tensor]):
    """Weights by name, those whose place holds FP8 codes dequantised at each access."""

    def __init__(self, places: Mapping[str, torch.Tensor], *, dtype: torch.dtype) -> None:
        self._places = places
        self._dtype = dtype
        self._scales = {scale_name(name) for name, place in places.items() if place.dtype == PACKED_DTYPE}

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._places[name]
        if place.dtype != PACKED_DTYPE:
            return place
        return dequantise(place, self._places[scale_name(name)], dtype=self._dtype)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._places if name not in self._scales)

    def __len__(self) -> int:
        return len(self._places) - len(self._scales)


def _allocate_others(
    spec: ModelSpec, layer: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | PackedMatrices]]:
    """Allocate all tensors except the routed experts': by mm2's relative names, and as transformers' layer has them."""
    in_float32, shapes = float32_names(spec.graph), expected_layer_shapes(spec, layer)
    places: dict[str, torch.Tensor] = {}
    modules: dict[str, torch.Tensor | PackedMatrices] = {}
    for module, names in module_weights(spec, layer).items():
        num_rows, (_, *others) = sum(shapes[name][0] for name in names), shapes[names[0]]
        held_dtype = torch.float32 if names[0] in in_float32 else dtype
        held = torch.empty(num_rows, *others, dtype=held_dtype, device=device)
        modules[module] = held
        parts = held.split([shapes[name][0] for name in names])
        places |= dict(zip(names, parts, strict=True))
    return places, modules


def _check_storage(experts: range, out: torch.Tensor, *, dtype: torch.dtype) -> None:
    if out.dtype != dtype:
        raise ValueError(f"the storage is {out.dtype}, expected {dtype}: another dtype gives other results")
    if out.dim() != 3 or out.shape[0] != len(experts):
        raise ValueError(f"the storage is {list(out.shape)}, expected 3 dims, {len(experts)} experts first")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LoadedLayer:
    """A layer in its storage, or on its way there."""

    layer: int
    storage: LayerStorage
    filling: Filling


class LayerLoader:
    """Fills one layer's storage after the other; with `prefetch`, two storages take turns.

    Whole layers are read past the page cache, because a pass needs each once. Single experts go through the cache: the
    next token may need them again. Two threads read for each core that torch computes with, unless `num_threads` says
    otherwise: some dequantise while others wait for the disk.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        new_storage: Callable[[int], LayerStorage],
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
        """Fill the storage of a layer, and begin to prefetch layer `then`; storage returned before becomes invalid."""
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
        storage = self._take_storage(layer)
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

    def _take_storage(self, layer: int) -> LayerStorage:
        has_router = layer_prefix(layer) + GATE in self._reader.index
        for number, storage in enumerate(self._idle):
            # A dense layer has no router, and other storage.
            if (GATE in storage.places) == has_router:
                return self._idle.pop(number)
        return self._new_storage(layer)

    def _start(self, layer: int) -> _LoadedLayer:
        storage = self._take_storage(layer)
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
