"""Conversion memory: float32 tensors that a conversion makes on its way, and weights that a port keeps in float32."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minimax_tools.machine.size import format_size
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expected_layer_shapes, layer_bytes
from neuron.weight_trace.source_tensors import SourceTensors, kind_of, word_kinds
from neuron.weight_trace.tensor_layout import TensorLayout

# Share of the layer's bytes from which temporaries are worth a line: a single matrix takes less.
_LEAST_SHARE = 0.1
_WIDE = (torch.float32, torch.float64)


class WideAllocations(TorchDispatchMode):
    """A block in which allocations of float32 and float64 tensors are counted; `peak_bytes` is the most at once.

    Memory that C++ holds without a Python tensor is not seen, nor what other threads allocate.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._held_bytes = 0
        self._bytes: dict[int, int] = {}  # bytes of each storage, by its address
        self._num_tensors: Counter[int] = Counter()  # living tensors of each storage

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count what it allocated."""
        result = func(*args, **(kwargs or {}))
        given = {_address(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if tensor.dtype in _WIDE:
                self._count(tensor, is_given=_address(tensor) in given)
        return result

    def _count(self, tensor: torch.Tensor, *, is_given: bool) -> None:
        address = _address(tensor)
        if address not in self._bytes:
            if is_given:
                return  # changed in place, or a view of what was there before
            self._bytes[address] = tensor.untyped_storage().nbytes()
            self._held_bytes += self._bytes[address]
            self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        self._num_tensors[address] += 1
        weakref.finalize(tensor, self._release, address)

    def _release(self, address: int) -> None:
        self._num_tensors[address] -= 1
        if not self._num_tensors[address]:
            self._held_bytes -= self._bytes.pop(address)


def word_memory(
    layouts: Sequence[TensorLayout],
    *,
    peak_bytes: int | None,
    spec: ModelSpec,
    checkpoint_spec: ModelSpec,
    dtype: torch.dtype,
) -> tuple[str, ...]:
    """Return sentences on memory that a run in `dtype` does not need; () if there is none.

    Args:
        layouts: What the port's tensors hold.
        peak_bytes: Most bytes of float32 temporaries at once, in the traced model; None if they were not measured.
        spec: The traced model.
        checkpoint_spec: The checkpoint's model, of which the sentences tell.
        dtype: Dtype of the run.
    """
    if dtype.itemsize >= torch.float32.itemsize:
        return ()
    sentences = []
    router_kinds = {source.kind for source in SourceTensors.of(spec).all if source.is_float32}
    wide = dict.fromkeys(
        kind
        for layout in layouts
        if layout.origin.dtype in _WIDE
        for kind in layout.source_kinds
        if kind not in router_kinds
    )
    if wide:
        added = _num_elements(checkpoint_spec, wide) * (torch.float32.itemsize - dtype.itemsize)
        sentences.append(
            f"{word_kinds(wide)} {'is' if len(wide) == 1 else 'are'} held in float32 though the run is in "
            f"{str(dtype).removeprefix('torch.')}: {format_size(added)} more for each layer of the model."
        )
    share = (peak_bytes or 0) / layer_bytes(spec, dtype)
    if share >= _LEAST_SHARE:
        needed = layer_bytes(checkpoint_spec, dtype)
        sentences.append(
            f"The conversion holds about {format_size(int(share * needed))} of float32 temporaries at once for a layer "
            f"of the model, beyond the {format_size(needed)} of its weights."
        )
    return tuple(sentences)


def _num_elements(spec: ModelSpec, kinds: Iterable[str]) -> int:
    wanted = set(kinds)
    return sum(
        torch.Size(shape).numel()
        for name, shape in expected_layer_shapes(spec).items()
        if kind_of(name) in wanted
    )


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
