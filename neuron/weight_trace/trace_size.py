"""Size of a trace: the sample of experts that fits in memory; and of the trial, the port's run on generated weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimax_tools.machine.memory import MemoryBudget, free_bytes
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_bytes
from neuron.weight_trace.source_tensors import SourceTensors

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

    experts: tuple[int, ...]  # numbers of the traced experts, sorted
    num_experts: int  # number of experts in the layer

    @classmethod
    def fitting(
        cls, spec: ModelSpec, dtype: torch.dtype, budget: MemoryBudget, *, num_layers_held: int
    ) -> ExpertSample:
        """Choose as many experts as fit in memory beside the port and its conversion, at least two.

        Args:
            spec: The traced model.
            dtype: Dtype of the port's weights.
            budget: Limit of the process; without one, the machine's free memory counts.
            num_layers_held: Copies of the layer in memory: the module, and what its conversion returns.

        Raises:
            MemoryBudgetError: Two experts do not fit in the budget; without one, they are traced all the same.
        """
        whole = SourceTensors.of(spec)
        expert_size = sum(source.size for source in whole.all if source.expert == 0)
        size_of_others = whole.size - expert_size * spec.num_local_experts
        min_experts = min(_MIN_EXPERTS, spec.num_local_experts)
        held_bytes = num_layers_held * layer_bytes(spec, dtype) + _SPARE_BYTES
        needed_bytes = held_bytes + (size_of_others + min_experts * expert_size) * _BYTES_PER_ELEMENT
        budget.require(needed_bytes, "tracing a layer of the model's own size")
        num_elements = (free_bytes(budget) - held_bytes) // _BYTES_PER_ELEMENT
        num_fitting = min((num_elements - size_of_others) // expert_size, spec.num_local_experts)
        return cls(
            experts=_choose(max(min_experts, num_fitting), spec.num_local_experts),
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
    """Memory plan of the trial."""

    dtype: torch.dtype  # dtype in which the port is built
    keeps_tensors: (
        bool  # True to keep the generated float32 weights in memory; else each access makes them anew
    )

    @classmethod
    def fitting(
        cls, spec: ModelSpec, dtype: torch.dtype, budget: MemoryBudget, *, num_layers_held: int
    ) -> TrialMemory:
        """Choose float32 where it fits in memory, else the run's dtype.

        Args:
            spec: The traced model.
            dtype: The run's dtype.
            budget: Limit of the process; without one, the machine's free memory counts.
            num_layers_held: Copies of the layer in memory: the module, and what its conversion returns.

        Raises:
            MemoryBudgetError: The layer does not fit in the budget in either dtype.
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
