"""Source tensors: the tensors of a checkpoint's layer, numbered element by element, and generated ones in their place.

A tensor's *kind* is the same for all experts: `q_proj`, `q_proj.bias`, `w1`, `shared_experts.up_proj`. A port tensor is
a tensor that the port's module holds; its origin tells which source elements landed there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.stored_names import StoredNames
from minimax_tools.model.weight_names import CORRECTION_BIAS, GATE, expected_layer_shapes, float32_names
from minimax_tools.stored_dtype import dtype_name
from reports.wording import word_order

_EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.")
_ROLES = {"w1": "w1 (gate)", "w2": "w2 (down)", "w3": "w3 (up)", "gate": "gate (router)"}
# Tensors of the router, with a row or a number for each expert.
ROUTER_NAMES = (GATE, CORRECTION_BIAS)
SHARED_EXPERTS = "shared_experts"  # the module that holds the shared expert
MAX_EXPERTS_LISTED = 8  # experts that a text lists


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """A tensor of a checkpoint's layer."""

    name: str  # mm2's name, relative to the layer
    shape: tuple[int, ...]  # one dim (norms, biases) or two
    start: int  # number of the first element
    is_float32: bool  # whether the router reads it in float32: no rounding is allowed
    word: str  # its kind as text; see `word_kinds`

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Number of elements in a row; 1 for a vector."""
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def expert(self) -> int | None:
        """Number of the expert that has this tensor; None for other tensors."""
        return expert_of(self.name)

    @property
    def kind(self) -> str:
        """The tensor's kind: `q_proj`, `w1`, `e_score_correction_bias`."""
        return kind_of(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensors:
    """Tensors of a layer, all or some, with their elements numbered from 0 without gaps."""

    all: tuple[SourceTensor, ...]  # the tensors, in the order of their numbers
    starts: torch.Tensor = field(repr=False, compare=False)  # number of each tensor's first element, int64
    names: StoredNames  # names of the family

    @classmethod
    def of(cls, spec: ModelSpec, layer: int, *, experts: Collection[int] | None = None) -> SourceTensors:
        """Number the tensors of a layer of `spec`; with `experts`, leave out the tensors of all other experts."""
        sources: list[SourceTensor] = []
        start, names, in_float32 = 0, spec.family.stored_names, float32_names(spec.graph)
        for name, shape in expected_layer_shapes(spec, layer).items():
            word = word_kinds([kind_of(name)], names)
            source = SourceTensor(
                name=name, shape=shape, start=start, is_float32=name in in_float32, word=word
            )
            if experts is None or source.expert is None or source.expert in experts:
                sources.append(source)
                start += source.size
        starts = torch.tensor([source.start for source in sources])
        return cls(all=tuple(sources), starts=starts, names=names)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.all[-1].start + self.all[-1].size

    def get(self, name: str) -> SourceTensor | None:
        """Return the tensor of that name; None if there is none."""
        return next((source for source in self.all if source.name == name), None)

    def word(self, kinds: Iterable[str]) -> str:
        """Return kinds as text; see `word_kinds`."""
        return word_kinds(kinds, self.names)

    def find(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the index in `all` of the tensor that holds each numbered element."""
        return torch.bucketize(numbers.contiguous(), self.starts, right=True) - 1

    def find_experts(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the expert of each numbered element; -1 for elements of other tensors."""
        experts = torch.tensor([-1 if source.expert is None else source.expert for source in self.all])
        return experts[self.find(numbers)]


def expert_of(name: str) -> int | None:
    """Return the number of the expert that has a tensor; None for other tensors."""
    match = _EXPERT.match(name)
    return int(match[1]) if match else None


def kind_of(name: str) -> str:
    """Return the kind of a tensor: the last part of its name without `.weight`.

    Of biases and shared experts it is the last two: other kinds have the last one too.
    """
    *path, last = name.removesuffix(".weight").split(".")
    return ".".join((*path[-1:], last)) if last == "bias" or path[-1:] == [SHARED_EXPERTS] else last


def kinds_of(sources: Iterable[SourceTensor]) -> tuple[str, ...]:
    """Return the kinds of the tensors, each once."""
    return tuple(dict.fromkeys(source.kind for source in sources))


def stored_kind(kind: str, names: StoredNames) -> str:
    """Return a kind as the checkpoint names it: `w1`, or `gate_proj`."""
    stored = {kind_of(own): kind_of(name) for own, name in names.layer.items()}
    return stored.get(kind, kind)


def word_kinds(kinds: Iterable[str], names: StoredNames) -> str:
    """Return the kinds as text, as the checkpoint names them, with their role: `w1 (gate), q_proj`."""
    stored = [stored_kind(kind, names) for kind in kinds]
    return ", ".join(_ROLES.get(kind, kind) for kind in stored)


def word_sources(sources: Iterable[SourceTensor]) -> str:
    """Return the tensors as text, one entry for several experts: `q_proj; w1 (gate) of experts 3, 4`."""
    experts_of: dict[str, list[int]] = {}
    for source in sources:
        experts = experts_of.setdefault(source.word, [])
        if source.expert is not None:
            experts.append(source.expert)
    words_with: dict[tuple[int, ...], list[str]] = {}
    for word, experts in experts_of.items():
        words_with.setdefault(tuple(experts), []).append(word)
    return "; ".join(
        ", ".join(words) + (f" of {word_experts(numbers)}" if numbers else "")
        for numbers, words in words_with.items()
    )


def word_experts(experts: Sequence[int]) -> str:
    """Return the numbers of experts as text: `expert 3`, `experts 3, 5`, `experts 0–31`."""
    if len(experts) == 1:
        return f"expert {experts[0]}"
    if list(experts) == list(range(experts[0], experts[0] + len(experts))):
        return f"experts {experts[0]}–{experts[-1]}"
    if sorted(experts) == list(range(min(experts), max(experts) + 1)):
        return f"experts {min(experts)}–{max(experts)} ({word_order(experts, noun='experts')})"
    shown = ", ".join(str(expert) for expert in experts[:MAX_EXPERTS_LISTED])
    return f"experts {shown}{', …' if len(experts) > MAX_EXPERTS_LISTED else ''}"


# In place of a source element's number:
CONSTANT = -1  # no source element landed
COMPUTED = -2  # the value is computed from several source elements
NOT_SAMPLED = -3  # a source element of an expert that is not traced landed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorOrigin:
    """Origins of a port tensor's elements; *landed* elements are those that hold a source element."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numbers: torch.Tensor
    gain: float | None
    offset: float | None
    rounding: float
    rounding_float32: float
    constant: float | None
    weight_sum: float | None = None
    num_mixed: int | None = None
    mixed_kinds: tuple[str, ...] = ()
    gains: torch.Tensor | None = None

    @property
    def has_landed(self) -> bool:
        """True if a source element landed here."""
        return bool((self.numbers >= 0).any())

    @property
    def num_computed(self) -> int:
        """Number of computed elements."""
        return int((self.numbers == COMPUTED).sum())

    @property
    def num_constant(self) -> int:
        """Number of elements that do not depend on the checkpoint."""
        return int((self.numbers == CONSTANT).sum())

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {dtype_name(self.dtype)}"


Tensors = Mapping[str, torch.Tensor]
# Makes the tensor of a name.
MakeTensor = Callable[[str], torch.Tensor]


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each made anew at every access: so a layer of true size never lies in memory."""

    def __init__(self, names: Collection[str], make: MakeTensor) -> None:
        self._names = names
        self._make = make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class GeneratedTensors(LayerTensors):
    """A stand-in for the checkpoint's `LayerTensors` that generates values and reads nothing.

    `make` makes the values of a tensor in its shape; `dtype` is that of all but the tensors of a float32 router. The
    model of `spec` may be smaller than the checkpoint's.
    """

    def __init__(
        self, spec: ModelSpec, *, layer: int, dtype: torch.dtype, make: MakeTensor, reader: CheckpointReader
    ) -> None:
        self._shapes = expected_layer_shapes(spec, layer)
        self._make = make
        in_float32 = float32_names(spec.graph)
        super().__init__(
            reader,
            layer=layer,
            dtype=dtype,
            stored={name: torch.float32 if name in in_float32 else dtype for name in self._shapes},
            present=dict.fromkeys(self._shapes),  # None for each name: no value is set in place of its tensor
            in_float32=in_float32,
        )

    def given_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which an access gives the tensor, without making it."""
        # The parent would make the tensor to answer. Nobody has set a "stored" one to another value.
        return self._stored[name] if self.is_stored(name) else super().given_dtype(name)

    def given_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in which an access gives the tensor."""
        return self._shapes[name] if self.is_stored(name) else super().given_shape(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        value = super().__getitem__(name)
        # The port may change in place what it gets.
        return value.contiguous() if self.is_stored(name) else value

    def _value_in_memory(self, name: str) -> torch.Tensor | None:
        value = super()._value_in_memory(name)
        return _cast(self._make(name), self._stored[name]) if value is None else value


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in a dtype; if a single number is expanded to it, so is the result."""
    if any(tensor.stride()):
        return tensor.to(dtype)
    return tensor[(0,) * tensor.dim()].to(dtype).expand(tensor.shape)
