"""Size of a trace: a smaller model, the experts that fit in memory, and memory that a port's conversion wastes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minimax_tools.machine.memory import MemoryBudget, free_bytes
from minimax_tools.machine.size import format_size
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expected_layer_shapes, layer_bytes
from neuron.weight_trace.source_tensors import SourceTensors, kind_of, word_kinds
from neuron.weight_trace.tensor_layout import TensorLayout

# A layer up to this size is traced as it is, in seconds; MiniMax-M2's layers have 3.7 billion elements.
MAX_ELEMENTS = 2_000_000
# More than ten: only from expert 10 on does the order of names as text differ from the order of numbers.
_NUM_EXPERTS = 16
_MIN_WIDTH = 64
# Halved widths stay multiples of 8, the unit in which ports and kernels divide them.
_WIDTH_UNIT = 8


def num_elements(spec: ModelSpec, layer: int) -> int:
    """Count the weights of a layer."""
    return sum(math.prod(shape) for shape in expected_layer_shapes(spec, layer).values())


def smaller_spec(spec: ModelSpec, layer: int, *, num_ranks: int = 1) -> ModelSpec:
    """Return a model of the same proportions with at most `MAX_ELEMENTS` weights in a layer, if halving gets that far.

    The head width, the query heads per kv head, the number of layers, and the ratio of hidden to intermediate size
    stay. If `num_ranks` divides the kv heads or the intermediate size, it still does.
    """
    if num_elements(spec, layer) <= MAX_ELEMENTS:
        return spec
    # At least an expert for each rank.
    smaller = _with(spec, num_local_experts=min(max(_NUM_EXPERTS, num_ranks), spec.num_local_experts))
    if num_elements(smaller, layer) <= MAX_ELEMENTS:
        return smaller
    while _can_halve_heads(smaller, num_ranks):
        smaller = _with(
            smaller,
            num_attention_heads=smaller.num_attention_heads // 2,
            num_key_value_heads=smaller.num_key_value_heads // 2,
        )
    while num_elements(smaller, layer) > MAX_ELEMENTS and _can_halve_widths(smaller, num_ranks):
        smaller = _with(
            smaller, hidden_size=smaller.hidden_size // 2, intermediate_size=smaller.intermediate_size // 2
        )
    return smaller


def _can_halve_heads(spec: ModelSpec, num_ranks: int) -> bool:
    num_heads = spec.num_key_value_heads
    # With a single kv head, heads in another order could not be seen.
    if num_heads % 2 or num_heads // 2 < max(2, min(num_ranks, num_heads)):
        return False
    return num_heads % num_ranks != 0 or num_heads // 2 % num_ranks == 0


def _can_halve_widths(spec: ModelSpec, num_ranks: int) -> bool:
    return all(
        width % (2 * unit) == 0 and width // 2 >= _MIN_WIDTH
        for width, unit in (
            (spec.hidden_size, _WIDTH_UNIT),
            (spec.intermediate_size, _WIDTH_UNIT * num_ranks),
        )
    )


def _with(spec: ModelSpec, **changes: int) -> ModelSpec:
    """Return the model with changed quantities of config.json.

    With fewer experts, a token takes at most a quarter of them, so that the router's choice still matters.
    """
    experts = changes.get("num_local_experts", spec.num_local_experts)
    if experts != spec.num_local_experts:
        changes["num_experts_per_tok"] = min(spec.num_experts_per_tok, max(1, experts // 4))
    return spec.resized(**changes)


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
        self._held: dict[int, int] = {}  # bytes of each storage, by its address

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count what it allocated."""
        result = func(*args, **(kwargs or {}))
        # Changed in place, or a view of what was there before.
        given = {storage._cdata for storage in _storages((args, kwargs), dtypes=None)}
        for storage in _storages(result, dtypes=_WIDE):
            if storage._cdata not in (given | self._held.keys()):
                self._held[storage._cdata] = storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, sum(self._held.values()))
                weakref.finalize(storage, self._held.pop, storage._cdata)
        return result


def word_memory(
    layouts: Sequence[TensorLayout],
    *,
    peak_bytes: int | None,
    spec: ModelSpec,
    layer: int,
    checkpoint_spec: ModelSpec,
    dtype: torch.dtype,
) -> tuple[str, ...]:
    """Return sentences on memory that a run of a layer in `dtype` does not need; () if there is none.

    `peak_bytes` are the most float32 temporaries at once in the traced model, None if they were not measured.
    """
    if dtype.itemsize >= torch.float32.itemsize:
        return ()
    sentences = []
    router_kinds = {source.kind for source in SourceTensors.of(spec, layer).all if source.is_float32}
    wide = dict.fromkeys(
        kind
        for layout in layouts
        if layout.origin.dtype in _WIDE
        for kind in layout.source_kinds
        if kind not in router_kinds
    )
    if wide:
        added = _num_elements(checkpoint_spec, layer, wide) * (torch.float32.itemsize - dtype.itemsize)
        words = word_kinds(wide, spec.family.stored_names)
        sentences.append(
            f"{words} {'is' if len(wide) == 1 else 'are'} held in float32 though the run is in "
            f"{str(dtype).removeprefix('torch.')}: {format_size(added)} more for each layer of the model."
        )
    share = (peak_bytes or 0) / layer_bytes(spec, dtype, layer)
    if share >= _LEAST_SHARE:
        needed = layer_bytes(checkpoint_spec, dtype, layer)
        sentences.append(
            f"The conversion holds about {format_size(int(share * needed))} of float32 temporaries at once for a layer "
            f"of the model, beyond the {format_size(needed)} of its weights."
        )
    return tuple(sentences)


def _num_elements(spec: ModelSpec, layer: int, kinds: Iterable[str]) -> int:
    wanted = set(kinds)
    return sum(
        torch.Size(shape).numel()
        for name, shape in expected_layer_shapes(spec, layer).items()
        if kind_of(name) in wanted
    )


def _storages(values: Any, *, dtypes: Collection[torch.dtype] | None) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors in some values, or of those of some dtypes."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if dtypes is None or tensor.dtype in dtypes]


# Peak for each traced element: two values of the port tensor, the element's number and masks, and temporaries of one
# tensor at a time while its layout is read.
_BYTES_PER_ELEMENT = 64
# Threads and libraries allocate this much when they are first used.
_SPARE_BYTES = 64 << 20
# Traced first, with the last expert, which a miscount loses. 10 and 2 change places if names are sorted as text.
_FIRST_CHOSEN = (0, 1, 10, 2)
_MIN_EXPERTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSample:
    """Experts whose elements are traced. The tensors outside the experts are always traced."""

    layer: int
    experts: tuple[int, ...]  # numbers of the traced experts, sorted
    num_experts: int  # number of experts in the layer; 0 for a dense one

    @classmethod
    def fitting(
        cls, spec: ModelSpec, layer: int, dtype: torch.dtype, budget: MemoryBudget, *, num_layers_held: int
    ) -> ExpertSample:
        """Choose as many experts of a layer as fit in memory beside `num_layers_held` copies of it, at least two.

        If two do not fit in the budget, that is a MemoryBudgetError; without a budget, they are traced all the same.
        """
        whole = SourceTensors.of(spec, layer)
        num_experts = 0 if spec.graph.layer(layer).is_dense else spec.num_local_experts
        expert_size = sum(source.size for source in whole.all if source.expert == 0)
        size_of_others = whole.size - expert_size * num_experts
        min_experts = min(_MIN_EXPERTS, num_experts)
        held_bytes = num_layers_held * layer_bytes(spec, dtype, layer) + _SPARE_BYTES
        needed_bytes = held_bytes + (size_of_others + min_experts * expert_size) * _BYTES_PER_ELEMENT
        budget.require(needed_bytes, "tracing a layer of the model's own size")
        num_elements = (free_bytes(budget) - held_bytes) // _BYTES_PER_ELEMENT
        num_fitting = min((num_elements - size_of_others) // expert_size, num_experts) if num_experts else 0
        return cls(
            layer=layer,
            experts=_choose(max(min_experts, num_fitting), num_experts),
            num_experts=num_experts,
        )

    @property
    def is_whole(self) -> bool:
        """True if every expert is traced."""
        return len(self.experts) == self.num_experts

    def sources(self, spec: ModelSpec) -> SourceTensors:
        """Number the traced tensors of a layer of `spec`."""
        return SourceTensors.of(spec, self.layer, experts=frozenset(self.experts))

    def __str__(self) -> str:
        return f"{len(self.experts)} of {self.num_experts} experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMemory:
    """Memory plan of the trial."""

    dtype: torch.dtype  # dtype in which the port is built
    keeps_tensors: (
        bool  # True to keep the generated float32 weights in memory; else each access makes them anew
    )

    @classmethod
    def fitting(
        cls, spec: ModelSpec, layer: int, dtype: torch.dtype, budget: MemoryBudget, *, num_layers_held: int
    ) -> TrialMemory:
        """Choose float32 where `num_layers_held` copies of a layer fit in memory, else the run's `dtype`.

        If the layer fits in neither, that is a MemoryBudgetError.
        """
        free, float32_bytes = free_bytes(budget), layer_bytes(spec, torch.float32, layer)
        if num_layers_held * float32_bytes <= free:
            return cls(dtype=torch.float32, keeps_tensors=(num_layers_held + 1) * float32_bytes <= free)
        budget.require(
            num_layers_held * layer_bytes(spec, dtype, layer), "running the port on generated weights"
        )
        return cls(dtype=dtype, keeps_tensors=False)


def _choose(count: int, num_experts: int) -> tuple[int, ...]:
    """Choose `count` experts: the last and those of `_FIRST_CHOSEN`, then others at even distances."""
    wanted = [number for number in (0, num_experts - 1, *_FIRST_CHOSEN) if number < num_experts]
    evenly = (number * num_experts // count for number in range(count))
    chosen = list(dict.fromkeys([*wanted, *evenly, *range(num_experts)]))[:count]
    return tuple(sorted(chosen))
