"""The few names of a torch-saved pickle that become values: the tables at the end map each to a function or a dtype.

A tensor becomes a `StoredTensor`, without device, gradients or hooks, and keeps its strides. Devices, sparse and
quantised tensors, and tensors without data stay inert. A function returns NotImplemented for what stays an inert
record; its errors mean a damaged file.
"""

from __future__ import annotations

import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from minimax_tools.torch_files.inert import InertRecord, Name, Vocabulary, hashable
from minimax_tools.torch_files.stored import Storage, StorageId, StoredTensor


def torch_vocabulary(
    find_storage: Callable[[StorageId], Storage], make_tensor: Callable[[StoredTensor], Any]
) -> Vocabulary:
    """Build the vocabulary of files that torch.save wrote.

    Args:
        find_storage: Function that finds a storage in the file.
        make_tensor: Function that turns each `StoredTensor` into the value to return: a `torch.Tensor`, or itself.
    """

    def persistent_load(persistent_id: Any) -> Any:
        storage_id = parse_storage_id(persistent_id)
        if storage_id is None:
            return InertRecord(module="torch", name="persistent_id", args=(persistent_id,))
        return find_storage(storage_id).narrow(storage_id.window)

    def build(builder: Callable[..., Any], *args: Any) -> Any:
        value = builder(*args)
        return make_tensor(value) if isinstance(value, StoredTensor) else value

    # `_tensor_of_type` looks up another builder in `_TENSOR_BUILDERS`: outside that table, it cannot find itself.
    tensor_builders = (
        *_TENSOR_BUILDERS.items(),
        (("torch._tensor", "_rebuild_from_type_v2"), _tensor_of_type),
    )
    return Vocabulary(
        constants=_DTYPES,
        builders={**_BUILDERS, **{name: partial(build, builder) for name, builder in tensor_builders}},
        state_builders=_STATE_BUILDERS,
        persistent_load=persistent_load,
    )


def parse_storage_id(persistent_id: Any) -> StorageId | None:
    """Return the storage that a persistent id names; None if it names something else.

    A persistent id is a pickle's reference to data outside of it: torch.save writes ("storage", class, key, device,
    number of elements), and in old files a sixth item for a view: (its key, first element, number of elements).
    """
    if not isinstance(persistent_id, tuple) or len(persistent_id) not in (5, 6):
        return None
    kind, storage_class, key, _, num_elements, *rest = persistent_id
    if kind != "storage" or not isinstance(storage_class, InertRecord) or not isinstance(key, str):
        return None
    dtype = _STORAGE_DTYPES.get(storage_class.name)
    if dtype is None or not storage_class.module.startswith("torch") or not isinstance(num_elements, int):
        return None
    window = rest[0][1:] if rest and isinstance(rest[0], tuple) and len(rest[0]) == 3 else None
    return StorageId(key=key, dtype=dtype, num_elements=num_elements, window=window)


def _tensor_v2(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> StoredTensor:
    # rest: requires_grad, backward_hooks, and the metadata if the tensor was lazily conjugated or negated
    return _with_bits(_strided(storage, offset, size, stride), rest[2:3])


def _tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> StoredTensor:
    # rest: requires_grad, backward_hooks, dtype, and the metadata as above
    return _with_bits(_strided(storage, offset, size, stride, dtype=rest[2]), rest[3:4])


def _strided(storage: Any, offset: Any, size: Any, stride: Any, *, dtype: Any = None) -> StoredTensor:
    if not isinstance(storage, Storage):
        raise TypeError("a tensor has no storage")
    dtype = storage.dtype if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor has no dtype")
    return StoredTensor(
        storage=storage,
        dtype=dtype,
        shape=_integers(size),
        stride=_integers(stride),
        start=operator.index(offset),
    )


def _with_bits(tensor: StoredTensor, metadata: tuple[Any, ...]) -> StoredTensor:
    """Add the lazy conjugation and negation that the tensor was saved with."""
    bits = metadata[0] if metadata and metadata[0] else {}
    if not isinstance(bits, dict) or not set(bits) <= {"conj", "neg"}:
        raise ValueError("a tensor's metadata is unknown")
    return replace(tensor, is_conjugate=bool(bits.get("conj")), is_negative=bool(bits.get("neg")))


def _parameter(data: Any, *_: Any) -> Any:
    return data if isinstance(data, StoredTensor | torch.Tensor) else NotImplemented


def _tensor_of_type(build: Any, _type: Any, args: Any, *_: Any) -> Any:
    """Rebuild a tensor of a subclass, or with attributes, as a plain tensor."""
    # Only a name itself is known, not the result of a call of it.
    if not isinstance(build, InertRecord) or build.args is not None or not isinstance(args, tuple):
        return NotImplemented
    builder = _TENSOR_BUILDERS.get((build.module, build.name))
    return NotImplemented if builder is None else builder(*args)


def _device_tensor(data: Any, dtype: Any, *_: Any) -> Any:
    # An XLA tensor is saved as a CPU tensor, in older versions as a numpy array.
    tensor = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
    if not isinstance(tensor, StoredTensor | torch.Tensor) or not isinstance(dtype, torch.dtype):
        raise TypeError("a device tensor has no data or no dtype")
    return replace(tensor, cast=dtype) if isinstance(tensor, StoredTensor) else tensor.to(dtype)


def _ordered_dict(pairs: Any = ()) -> OrderedDict[Any, Any]:
    if not isinstance(pairs, list | tuple):
        raise TypeError("an OrderedDict needs pairs")
    return OrderedDict((hashable(key), value) for key, value in pairs)


def _counter(counts: Any = None) -> Any:
    return dict(counts or {}) if isinstance(counts, dict | None) else NotImplemented


def _complex(real: Any, imaginary: Any) -> complex:
    if not isinstance(real, float | int) or not isinstance(imaginary, float | int):
        raise TypeError("a complex number needs two numbers")
    return complex(real, imaginary)


def _bytes_of_text(text: Any, encoding: Any) -> Any:
    # Protocol 2 writes bytes as Latin-1 text. Other codecs run code, and stay inert.
    is_bytes = isinstance(text, str) and encoding in ("latin1", "latin-1")
    return text.encode("latin-1") if is_bytes else NotImplemented


def _bytearray(content: Any = b"", encoding: Any = None) -> Any:
    content = _bytes_of_text(content, encoding) if isinstance(content, str) else content
    return bytearray(content) if isinstance(content, bytes | bytearray) else NotImplemented


def _numpy_scalar(dtype_record: Any, content: Any = None) -> Any:
    dtype = _numpy_dtype(dtype_record)
    if dtype is None or not isinstance(content, bytes | bytearray):
        return NotImplemented
    return np.frombuffer(content, dtype, count=1)[0].item()


def _numpy_array(record: InertRecord, state: Any) -> Any:
    """Rebuild a numpy array from the state of its pickle. Arrays of objects or fields stay inert."""
    if not isinstance(state, tuple) or len(state) != 5:
        return NotImplemented
    _version, shape, dtype_record, is_fortran, content = state
    dtype = _numpy_dtype(dtype_record)
    if dtype is None or not isinstance(content, bytes | bytearray):
        return NotImplemented
    array = np.frombuffer(content, dtype).reshape(_integers(shape), order="F" if is_fortran else "C")
    # Converted to the machine's byte order, which torch needs.
    return array.astype(dtype.newbyteorder("="))


def _numpy_dtype(record: Any) -> np.dtype[Any] | None:
    """Return the dtype that an inert `numpy.dtype` describes; None unless it is of plain numbers."""
    if not isinstance(record, InertRecord) or not record.args:
        return None
    if (record.module, record.name) != ("numpy", "dtype"):
        return None
    code = record.args[0]
    if not isinstance(code, str) or re.fullmatch(r"b1|[iu][1248]|f[248]|c(8|16)", code) is None:
        return None
    # The state is (version, byte order, …); `|` is for single bytes.
    order = record.state[1] if isinstance(record.state, tuple) and len(record.state) > 1 else "|"
    return np.dtype(f"{order}{code}") if order in ("<", ">", "|") else None


def _integers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list):
        raise TypeError("a shape is not a tuple")
    return tuple(operator.index(value) for value in values)


def _hashables(items: Any) -> list[Any]:
    if not isinstance(items, list | tuple):
        raise TypeError("a set needs a list")
    return [hashable(item) for item in items]


def _in_modules(
    modules: tuple[str, ...], name: str, builder: Callable[..., Any]
) -> dict[Name, Callable[..., Any]]:
    """Enter a builder under its name in each of several modules."""
    return {(module, name): builder for module in modules}


# Built once from torch: names of a file are looked up here, never in a module.
_DTYPES: Mapping[Name, torch.dtype] = MappingProxyType(
    {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
)

_STORAGE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BFloat16Storage": torch.bfloat16,
        "BoolStorage": torch.bool,
        "ByteStorage": torch.uint8,
        "CharStorage": torch.int8,
        "ComplexDoubleStorage": torch.complex128,
        "ComplexFloatStorage": torch.complex64,
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "IntStorage": torch.int32,
        "LongStorage": torch.int64,
        "ShortStorage": torch.int16,
        "UntypedStorage": torch.uint8,
    }
)

_TENSOR_BUILDERS: Mapping[Name, Callable[..., Any]] = MappingProxyType(
    {
        ("torch._utils", "_rebuild_tensor"): _strided,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
        ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _device_tensor,
        ("torch._utils", "_rebuild_device_tensor_from_numpy"): _device_tensor,
        ("torch._utils", "_rebuild_xla_tensor"): _device_tensor,
    }
)


# Protocol 2 writes names of Python 2; numpy 2 moved its modules.
_BUILTINS = ("builtins", "__builtin__")
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")

_BUILDERS: Mapping[Name, Callable[..., Any]] = MappingProxyType(
    {
        ("torch", "Size"): lambda dims: torch.Size(_integers(dims)),
        ("collections", "OrderedDict"): _ordered_dict,
        # The factory is not called: missing keys stay missing.
        ("collections", "defaultdict"): lambda *_: {},
        ("collections", "Counter"): _counter,
        ("_codecs", "encode"): _bytes_of_text,
        **_in_modules(_BUILTINS, "set", lambda items=(): set(_hashables(items))),
        **_in_modules(_BUILTINS, "frozenset", lambda items=(): frozenset(_hashables(items))),
        **_in_modules(_BUILTINS, "complex", _complex),
        **_in_modules(_BUILTINS, "bytearray", _bytearray),
        **_in_modules(_NUMPY, "scalar", _numpy_scalar),
    }
)

_STATE_BUILDERS: Mapping[Name, Callable[[InertRecord, Any], Any]] = MappingProxyType(
    _in_modules(_NUMPY, "_reconstruct", _numpy_array)
)
