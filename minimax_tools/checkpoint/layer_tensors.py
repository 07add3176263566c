"""The tensors of a decoder layer as a mapping, each read from the checkpoint at its access.

A port's `convert_state_dict` gets this mapping. It can be read, popped from and added to like a dict, and `copy` reads
nothing. Each access reads one tensor. So a full-size layer (7 GB) lies in memory only if the port keeps all of it, as
`dict(tensors)` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from copy import copy

import torch

from minimax_tools.checkpoint.layer_faults import verify_layer
from minimax_tools.checkpoint.reader import CheckpointReader, check_range, copy_matrix
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FLOAT32_NAMES, expected_layer_shapes, layer_prefix

_DTYPES = (torch.bfloat16, torch.float32)


class LayerTensors(MutableMapping[str, torch.Tensor]):
    """A decoder layer's tensors by the hub's names relative to the layer, experts in integer order.

    FP8 is dequantised, and its scales are no keys. Values come on the CPU in `dtype`, router gate and correction bias
    in float32. Tensors that were read are not kept: two accesses give two tensors. Values that were set are kept.
    A name that the layer lacks is a KeyError; only `in` and `is_stored` give False.

    `open` builds the mapping. `stored` is the dtype of each tensor in the checkpoint. `present` has the keys that the
    mapping has now: with the value that was set, or with None for a tensor that is read from the checkpoint.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        *,
        layer: int,
        dtype: torch.dtype,
        stored: Mapping[str, torch.dtype],
        present: Mapping[str, torch.Tensor | None],
    ) -> None:
        self.layer = layer
        self.dtype = dtype
        self.reader = reader
        self._stored = stored
        self._present = dict(present)

    @classmethod
    def open(cls, reader: CheckpointReader, spec: ModelSpec, layer: int, dtype: torch.dtype) -> LayerTensors:
        """Return the tensors of `layer` after checking their headers against `spec`; no data is read.

        Raises:
            CheckpointError: A tensor or its scales are missing, have another shape or an unreadable dtype, or the
                layer holds a tensor that no MiniMax-M2 has. Every fault is listed.
            ValueError: `dtype` is neither bfloat16 nor float32.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype}, expected torch.bfloat16 or torch.float32")
        verify_layer(reader.index, spec, layer)
        prefix = layer_prefix(layer)
        names = expected_layer_shapes(spec)
        return cls(
            reader,
            layer=layer,
            dtype=dtype,
            stored={name: reader.index[prefix + name].dtype.as_torch() for name in names},
            present=dict.fromkeys(names),
        )

    def of_layer(self, layer: int) -> LayerTensors:
        """Return the tensors of another layer of the same checkpoint, none of them replaced.

        Raises:
            CheckpointError: The checkpoint lacks one.
        """
        prefix = layer_prefix(layer)
        return LayerTensors(
            self.reader,
            layer=layer,
            dtype=self.dtype,
            stored={name: self.reader.index[prefix + name].dtype.as_torch() for name in self._stored},
            present=dict.fromkeys(self._stored),
        )

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the checkpoint stores a tensor, also after it was popped or replaced."""
        if name not in self._stored:
            raise self._unknown(name)
        return self._stored[name]

    def given_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the value that `[name]` gives."""
        value = self._value_in_memory(name)
        if value is not None:
            return value.dtype
        return torch.float32 if name in FLOAT32_NAMES else self.dtype

    def given_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the value that `[name]` gives."""
        value = self._value_in_memory(name)
        return self.reader.index[self._full_name(name)].shape if value is None else tuple(value.shape)

    def is_stored(self, name: str) -> bool:
        """Decide whether a tensor is read from the checkpoint: no value was set in its place."""
        return name in self._present and self._present[name] is None

    def read_into(
        self, name: str, out: torch.Tensor, *, rows: range | None = None, columns: range | None = None
    ) -> None:
        """Fill `out` with the values of a tensor, cast to its dtype, or with those of some rows and columns.

        Other rows are not read. Arguments are as for `CheckpointReader.read_weight_into`.

        Raises:
            ValueError: The tensor has no such rows or columns, `out` has another shape than they, or the tensor was
                set to FP8 codes, whose scales are unknown.
        """
        value = self._value_in_memory(name)
        if value is None:
            self.reader.read_weight_into(self._full_name(name), out, rows=rows, columns=columns)
            return
        if rows is not None:
            check_range(rows, value.shape[0], name=name, unit="rows")
            value = value[rows.start : rows.stop]
        if columns is not None:
            check_range(columns, value.shape[1], name=name, unit="columns")
            value = value[:, columns.start : columns.stop]
        copy_weight(name, value, out)

    def copy(self) -> LayerTensors:
        """Return a second mapping over the same checkpoint; changes to one do not affect the other."""
        copied = copy(self)
        copied._present = dict(self._present)
        return copied

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self._value_in_memory(name)
        if value is not None:
            return value
        return self.reader.read_weight(self._full_name(name), self.given_dtype(name))

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        self._present[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self._present:
            raise self._unknown(name)
        del self._present[name]

    def __contains__(self, name: object) -> bool:
        return name in self._present

    def __iter__(self) -> Iterator[str]:
        return iter(self._present)

    def __len__(self) -> int:
        return len(self._present)

    def __repr__(self) -> str:
        return f"LayerTensors(layer={self.layer}, dtype={self.dtype}, {len(self)} tensors)"

    def _full_name(self, name: str) -> str:
        return layer_prefix(self.layer) + name

    def _value_in_memory(self, name: str) -> torch.Tensor | None:
        """Return the value that was set for a name; None if it must be read from the checkpoint."""
        if name not in self._present:
            raise self._unknown(name)
        return self._present[name]

    def _unknown(self, name: str) -> KeyError:
        return KeyError(f"layer {self.layer} has no tensor {name!r} (names are relative to the layer)")


def copy_weight(name: str, value: torch.Tensor, out: torch.Tensor) -> None:
    """Copy `value` to `out`, cast to its dtype.

    Raises:
        ValueError: The shapes differ, or `value` is FP8 codes, whose scales are unknown here.
    """
    if value.shape != out.shape:
        raise ValueError(f"{name} has shape {list(value.shape)}, out has {list(out.shape)}")
    if value.dtype == torch.float8_e4m3fn:
        raise ValueError(f"{name} is FP8 codes: without its scales it is no weight; dequantise it first")
    copy_matrix(value, out)
