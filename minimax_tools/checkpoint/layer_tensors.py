"""The tensors of a decoder layer or of a whole model as a mapping, each read from the checkpoint at its access.

A port's `convert_state_dict` gets this mapping. It can be read, popped from and added to like a dict, and `copy` reads
nothing. So a full-size layer (7 GB) lies in memory only if the port keeps all of it, as `dict(tensors)` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import TypeVar

import torch

from minimax_tools.checkpoint.layer_faults import verify_layer
from minimax_tools.checkpoint.reader import CheckpointReader, check_range, copy_matrix
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    EMBEDDING,
    FINAL_NORM,
    FLOAT32_NAMES,
    LM_HEAD,
    expected_layer_shapes,
    float32_names,
    layer_prefix,
)

_DTYPES = (torch.bfloat16, torch.float32)
Tensors = TypeVar("Tensors", bound="CheckpointTensors")


class CheckpointTensors(MutableMapping[str, torch.Tensor]):
    """Tensors of a checkpoint by mm2's names, relative to `prefix`.

    FP8 is dequantised, and its scales are no keys. Values come on the CPU in `dtype`, tensors whose names end in one of
    `in_float32` in float32. Tensors that were read are not kept: two accesses give two tensors. Values that were set
    are.
    A name that is not there is a KeyError; only `in` and `is_stored` give False.

    `present` has the keys that the mapping has now: with the value that was set, or with None for a tensor that is read
    from the checkpoint.

    Raises:
        ValueError: `dtype` is neither bfloat16 nor float32.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        *,
        prefix: str,
        dtype: torch.dtype,
        present: Mapping[str, torch.Tensor | None],
        in_float32: tuple[str, ...] = FLOAT32_NAMES,
    ) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype}, expected torch.bfloat16 or torch.float32")
        self.dtype = dtype
        self.reader = reader
        self.prefix = prefix
        self._present = dict(present)
        self.in_float32 = in_float32

    def given_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the value that `[name]` gives."""
        value = self._value_in_memory(name)
        if value is not None:
            return value.dtype
        return torch.float32 if name.endswith(self.in_float32) else self.dtype

    def given_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the value that `[name]` gives."""
        value = self._value_in_memory(name)
        return self.reader.index[self.prefix + name].shape if value is None else tuple(value.shape)

    def is_stored(self, name: str) -> bool:
        """Decide whether a tensor is read from the checkpoint: no value was set in its place."""
        return name in self._present and self._present[name] is None

    def read_into(
        self, name: str, out: torch.Tensor, *, rows: range | None = None, columns: range | None = None
    ) -> None:
        """Fill `out` with the values of a tensor, cast to its dtype, or with those of some rows and columns.

        Arguments are as for `CheckpointReader.read_weight_into`.

        Raises:
            ValueError: `out` has another shape, or the tensor was set to FP8 codes, whose scales are unknown.
        """
        value = self._value_in_memory(name)
        if value is None:
            self.reader.read_weight_into(self.prefix + name, out, rows=rows, columns=columns)
            return
        if rows is not None:
            check_range(rows, value.shape[0], name=name, unit="rows")
            value = value[rows.start : rows.stop]
        if columns is not None:
            check_range(columns, value.shape[1], name=name, unit="columns")
            value = value[:, columns.start : columns.stop]
        copy_weight(name, value, out)

    def copy(self: Tensors) -> Tensors:
        """Return a second mapping over the same checkpoint; changes to one do not affect the other."""
        copied = copy(self)
        copied._present = dict(self._present)
        return copied

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self._value_in_memory(name)
        if value is not None:
            return value
        return self.reader.read_weight(self.prefix + name, self.given_dtype(name))

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
        return f"{type(self).__name__}({self.prefix}*, dtype={self.dtype}, {len(self)} tensors)"

    def _value_in_memory(self, name: str) -> torch.Tensor | None:
        """Return the value that was set for a name; None if it must be read from the checkpoint."""
        if name not in self._present:
            raise self._unknown(name)
        return self._present[name]

    def _unknown(self, name: str) -> KeyError:
        relative = f" (names are relative to {self.prefix})" if self.prefix else ""
        return KeyError(f"there is no tensor {name!r}{relative}")


class LayerTensors(CheckpointTensors):
    """A decoder layer's tensors, experts in integer order; `open` builds the mapping.

    `stored` is the dtype of each tensor in the checkpoint.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        *,
        layer: int,
        dtype: torch.dtype,
        stored: Mapping[str, torch.dtype],
        present: Mapping[str, torch.Tensor | None],
        in_float32: tuple[str, ...] = FLOAT32_NAMES,
    ) -> None:
        super().__init__(
            reader, prefix=layer_prefix(layer), dtype=dtype, present=present, in_float32=in_float32
        )
        self.layer = layer
        self._stored = stored

    @classmethod
    def open(cls, reader: CheckpointReader, spec: ModelSpec, layer: int, dtype: torch.dtype) -> LayerTensors:
        """Return the tensors of `layer` after checking their headers against `spec`; no data is read.

        Raises:
            CheckpointError: A tensor or its scales are missing, have another shape or an unreadable dtype, or the
                layer holds a tensor that no model of its family has. Every fault is listed.
        """
        verify_layer(reader.index, spec, layer)
        return cls._of_names(
            reader, layer, dtype, expected_layer_shapes(spec, layer), float32_names(spec.graph)
        )

    @classmethod
    def _of_names(
        cls,
        reader: CheckpointReader,
        layer: int,
        dtype: torch.dtype,
        names: Iterable[str],
        in_float32: tuple[str, ...],
    ) -> LayerTensors:
        stored = {name: reader.index[layer_prefix(layer) + name].dtype.as_torch() for name in names}
        return cls(
            reader,
            layer=layer,
            dtype=dtype,
            stored=stored,
            present=dict.fromkeys(stored),
            in_float32=in_float32,
        )

    def of_layer(self, layer: int) -> LayerTensors:
        """Return the tensors of another layer of the same checkpoint, none of them replaced."""
        return LayerTensors._of_names(self.reader, layer, self.dtype, self._stored, self.in_float32)

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the checkpoint stores a tensor, also after it was popped or replaced."""
        if name not in self._stored:
            raise self._unknown(name)
        return self._stored[name]


class ModelTensors(CheckpointTensors):
    """Tensors of a whole model by mm2's full names; `open` builds the mapping."""

    @classmethod
    def open(
        cls, reader: CheckpointReader, spec: ModelSpec, dtype: torch.dtype, *, with_layers: bool = True
    ) -> ModelTensors:
        """Return the model's tensors after checking the headers of its layers; no data is read.

        `with_layers=False` leaves out the layers: embedding, final norm and lm_head remain.

        Raises:
            CheckpointError: A layer's tensors are missing, or of another shape than config.json says.
        """
        names = [EMBEDDING, FINAL_NORM, *(() if spec.tie_word_embeddings else (LM_HEAD,))]
        for layer in range(spec.num_hidden_layers if with_layers else 0):
            verify_layer(reader.index, spec, layer)
            names += (layer_prefix(layer) + name for name in expected_layer_shapes(spec, layer))
        return cls(
            reader, prefix="", dtype=dtype, present=dict.fromkeys(names), in_float32=float32_names(spec.graph)
        )


def copy_weight(name: str, value: torch.Tensor, out: torch.Tensor) -> None:
    """Copy `value` to `out`, cast to its dtype; raise ValueError for another shape, and for FP8 codes."""
    if value.shape != out.shape:
        raise ValueError(f"{name} has shape {list(value.shape)}, out has {list(out.shape)}")
    if value.dtype == torch.float8_e4m3fn:
        raise ValueError(f"{name} is FP8 codes: without its scales it is no weight; dequantise it first")
    copy_matrix(value, out)
