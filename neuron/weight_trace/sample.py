"""Sample: which experts of a layer are followed through a conversion, as many as memory holds; all else always is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimax_tools.machine.memory import MemoryBudget, available_bytes
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_bytes
from neuron.weight_trace.sources import Sources

# Of an element that is followed: the place's values after two passes, its number, and, of one place at a time, what
# putting its layout into words takes.
_BYTES_PER_ELEMENT = 64
# What threads and libraries take for themselves when they are first used.
_SPARE_BYTES = 64 << 20
# Of the free memory, what is planned with: the rest is for what no shape tells.
_SHARE = 0.9
# Two, so that one is not all; the last, which a miscount loses; and those that sort otherwise as text.
_FIRST_CHOSEN = (0, 1, 10, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The experts that are followed.

    Args:
        experts: Their numbers, sorted.
        num_experts: How many the layer has.
    """

    experts: tuple[int, ...]
    num_experts: int

    @classmethod
    def that_fits(
        cls, spec: ModelSpec, dtype: torch.dtype, budget: MemoryBudget, *, num_layers_held: int
    ) -> Sample:
        """As many experts as fit beside a port and its conversion, two at least.

        Args:
            spec: The model that is traced.
            dtype: Of its weights.
            num_layers_held: How often they lie in memory: in the module, and in what a conversion returns.
            budget: What the process may hold; without a limit, the machine's free memory is.

        Raises:
            MemoryBudgetError: Two do not fit.
        """
        whole = Sources.of(spec)
        of_expert = sum(source.size for source in whole.all if source.expert == 0)
        others = whole.size - of_expert * spec.num_local_experts
        least = min(2, spec.num_local_experts)
        held = num_layers_held * layer_bytes(spec, dtype) + _SPARE_BYTES
        needed = held + (others + least * of_expert) * _BYTES_PER_ELEMENT
        budget.require(needed, "tracing a layer of the model's own size")
        fitting = ((_free_bytes(budget) - held) // _BYTES_PER_ELEMENT - others) // of_expert
        return cls(
            experts=_choose(max(least, min(fitting, spec.num_local_experts)), spec.num_local_experts),
            num_experts=spec.num_local_experts,
        )

    @property
    def is_whole(self) -> bool:
        """Whether every expert is followed."""
        return len(self.experts) == self.num_experts

    def sources(self, spec: ModelSpec) -> Sources:
        """The tensors that are followed in a layer of `spec`."""
        whole = Sources.of(spec)
        if self.is_whole:
            return whole
        chosen = set(self.experts)
        return whole.only(source.name for source in whole.all if source.expert in {None, *chosen})

    def __str__(self) -> str:
        return f"{len(self.experts)} of {self.num_experts} experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRoom:
    """How a port is run on made weights, in the memory that there is.

    Args:
        dtype: What it is built in.
        keeps_tensors: Whether the made weights lie beside it.
    """

    dtype: torch.dtype
    keeps_tensors: bool

    @classmethod
    def that_fits(
        cls, spec: ModelSpec, dtype: torch.dtype, budget: MemoryBudget, *, num_layers_held: int
    ) -> TrialRoom:
        """In float32 where that fits, else in the run's dtype.

        Args:
            spec: The model that is traced.
            dtype: The run's.
            num_layers_held: How often its weights lie in memory.
            budget: What the process may hold; without a limit, the machine's free memory is.

        Raises:
            MemoryBudgetError: Neither fits.
        """
        free, exact = _free_bytes(budget), layer_bytes(spec, torch.float32)
        if (num_layers_held + 1) * exact <= free:
            return cls(dtype=torch.float32, keeps_tensors=True)
        if num_layers_held * exact <= free:
            return cls(dtype=torch.float32, keeps_tensors=False)
        budget.require(num_layers_held * layer_bytes(spec, dtype), "running the port on made weights")
        return cls(dtype=dtype, keeps_tensors=False)


def _free_bytes(budget: MemoryBudget) -> int:
    left = budget.left_bytes
    return int(available_bytes() * _SHARE) if left is None else left


def _choose(count: int, num_experts: int) -> tuple[int, ...]:
    """So many experts: the telling ones first, then others evenly over all."""
    wanted = [number for number in (0, num_experts - 1, *_FIRST_CHOSEN) if number < num_experts]
    evenly = (number * num_experts // count for number in range(count))
    chosen = list(dict.fromkeys([*wanted, *evenly, *range(num_experts)]))[:count]
    return tuple(sorted(chosen))
