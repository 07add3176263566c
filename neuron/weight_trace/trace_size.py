"""Size of a trace: a smaller model, a sample of experts, and the trial's dtype, chosen to fit in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from minimax_tools.errors import CheckpointError
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expected_layer_shapes, layer_bytes
from neuron.runs.footprint import free_bytes
from neuron.weight_trace.source_tensors import SourceTensors

# A layer up to this size is traced as it is, in seconds; MiniMax-M2's layers have 3.7 billion elements.
MAX_ELEMENTS = 2_000_000
# More than ten: only from expert 10 on does the order of names as text differ from the order of numbers.
_NUM_EXPERTS = 16
_MIN_WIDTH = 64
# Halved widths stay multiples of 8, the unit in which ports and kernels divide them.
_WIDTH_UNIT = 8

# Peak for each traced element: two values of the port tensor, the element's number and masks, and temporaries of one
# tensor at a time while its layout is read.
_BYTES_PER_ELEMENT = 64
# Threads and libraries allocate this much when they are first used.
_SPARE_BYTES = 64 << 20
# Chosen first, with the last expert, which a miscount loses. 10 and 2 change places when names are sorted as text.
_FIRST_CHOSEN = (0, 1, 10, 2)
_MIN_EXPERTS = 2


def num_elements(spec: ModelSpec) -> int:
    """Count the weights of a layer."""
    return sum(math.prod(shape) for shape in expected_layer_shapes(spec).values())


def smaller_spec(spec: ModelSpec, *, num_ranks: int = 1) -> ModelSpec:
    """Return a model of the same proportions with at most `MAX_ELEMENTS` weights a layer, where halving gets there.

    The head width, the query heads per kv head, the layer numbers, and the ratio of hidden to intermediate size stay.
    All that ranks divide still divides. A model that is small enough is returned as it is.
    """
    if num_elements(spec) <= MAX_ELEMENTS:
        return spec
    found = _with(spec, num_local_experts=min(_NUM_EXPERTS, spec.num_local_experts))
    if num_elements(found) <= MAX_ELEMENTS:
        return found
    min_kv_heads = max(2, min(num_ranks, spec.num_key_value_heads))
    while found.num_key_value_heads > min_kv_heads and found.num_key_value_heads % 2 == 0:
        found = _with(
            found,
            num_attention_heads=found.num_attention_heads // 2,
            num_key_value_heads=found.num_key_value_heads // 2,
        )
    while num_elements(found) > MAX_ELEMENTS and _can_halve(found, num_ranks):
        found = _with(
            found, hidden_size=found.hidden_size // 2, intermediate_size=found.intermediate_size // 2
        )
    return found


def _can_halve(spec: ModelSpec, num_ranks: int) -> bool:
    return all(
        width % (2 * unit) == 0 and width // 2 >= _MIN_WIDTH
        for width, unit in (
            (spec.hidden_size, _WIDTH_UNIT),
            (spec.intermediate_size, _WIDTH_UNIT * num_ranks),
        )
    )


def _with(spec: ModelSpec, **changes: int) -> ModelSpec:
    experts = changes.get("num_local_experts", spec.num_local_experts)
    if experts != spec.num_local_experts:
        changes["num_experts_per_tok"] = min(spec.num_experts_per_tok, max(1, experts // 4))
    try:
        return ModelSpec.from_config({**spec.raw, "head_dim": spec.head_dim, **changes})
    except CheckpointError:
        # The changed quantities do not divide: keep the model as it is.
        return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSample:
    """Experts whose elements are traced; all other tensors always are.

    Args:
        experts: Their numbers, sorted.
        num_experts: Number of experts in the layer.
    """

    experts: tuple[int, ...]
    num_experts: int

    @classmethod
    def fitting(
        cls, spec: ModelSpec, dtype: torch.dtype, budget: MemoryBudget, *, num_layers_held: int
    ) -> ExpertSample:
        """Choose as many experts as fit in memory beside the port and its conversion, at least two.

        Args:
            spec: The traced model.
            dtype: Dtype of its weights.
            budget: Limit of the process; without one, the machine's free memory counts.
            num_layers_held: Copies of the layer in memory: the module, and what its conversion returns.

        Raises:
            MemoryBudgetError: Two experts do not fit.
        """
        whole = SourceTensors.of(spec)
        of_expert = sum(source.size for source in whole.all if source.expert == 0)
        others = whole.size - of_expert * spec.num_local_experts
        least = min(_MIN_EXPERTS, spec.num_local_experts)
        held = num_layers_held * layer_bytes(spec, dtype) + _SPARE_BYTES
        needed = held + (others + least * of_expert) * _BYTES_PER_ELEMENT
        budget.require(needed, "tracing a layer of the model's own size")
        num_fitting = ((free_bytes(budget) - held) // _BYTES_PER_ELEMENT - others) // of_expert
        return cls(
            experts=_choose(max(least, min(num_fitting, spec.num_local_experts)), spec.num_local_experts),
            num_experts=spec.num_local_experts,
        )

    @property
    def is_whole(self) -> bool:
        """True if every expert is traced."""
        return len(self.experts) == self.num_experts

    def sources(self, spec: ModelSpec) -> SourceTensors:
        """Number the traced tensors of a layer of `spec`."""
        return SourceTensors.of(spec, experts=frozenset(self.experts))

    def __str__(self) -> str:
        return f"{len(self.experts)} of {self.num_experts} experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMemory:
    """Memory plan of the trial.

    Args:
        dtype: Dtype in which the port is built.
        keeps_tensors: True to keep the generated weights in memory, in float32; else each access makes them anew.
    """

    dtype: torch.dtype
    keeps_tensors: bool

    @classmethod
    def fitting(
        cls, spec: ModelSpec, dtype: torch.dtype, budget: MemoryBudget, *, num_layers_held: int
    ) -> TrialMemory:
        """Choose float32 where it fits in memory, else the run's dtype.

        Args:
            spec: The traced model.
            dtype: The run's dtype.
            budget: Limit of the process; without one, the machine's free memory counts.
            num_layers_held: Copies of the layer in memory.

        Raises:
            MemoryBudgetError: Neither fits.
        """
        free, float32_bytes = free_bytes(budget), layer_bytes(spec, torch.float32)
        if num_layers_held * float32_bytes <= free:
            return cls(dtype=torch.float32, keeps_tensors=(num_layers_held + 1) * float32_bytes <= free)
        budget.require(num_layers_held * layer_bytes(spec, dtype), "running the port on generated weights")
        return cls(dtype=dtype, keeps_tensors=False)


def _choose(count: int, num_experts: int) -> tuple[int, ...]:
    """Choose `count` experts: the last and those of `_FIRST_CHOSEN`, then others at even distances."""
    wanted = [number for number in (0, num_experts - 1, *_FIRST_CHOSEN) if number < num_experts]
    evenly = (number * num_experts // count for number in range(count))
    chosen = list(dict.fromkeys([*wanted, *evenly, *range(num_experts)]))[:count]
    return tuple(sorted(chosen))
