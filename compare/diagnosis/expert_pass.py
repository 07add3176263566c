"""Expert pass: many evaluations at once, so that every expert's weights are made float32 once for all of them.

T tokens, k experts per token, H hidden, I intermediate, n rows of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from compare.diagnosis.layer_weights import LayerWeights
from minimax_tools.machine.core_pool import CorePool
from minimax_tools.model.weight_names import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, expert_weight
from minimax_tools.reference.float32_stages import swiglu

# From gate [n,I], up [n,I] and the shares [n] of these experts to the input of the down projection, [n,I].
Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# From an expert's number and matrix to its values, float32.
ReadMatrix = Callable[[LayerWeights, int, str], torch.Tensor]


def _mix(gate: torch.Tensor, up: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return swiglu(gate, up)


def read_matrix(weights: LayerWeights, expert: int, matrix: str) -> torch.Tensor:
    """Read a matrix as it is."""
    return weights.value(expert_weight(expert, matrix))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An expert's arithmetic.

    Args:
        mix: Its activation.
        read: How its matrices are read.
        changed: The matrices that `read` gives other values for: w1, w2, w3.
    """

    mix: Mix = _mix
    read: ReadMatrix = read_matrix
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertJob:
    """A request of one evaluation to the experts.

    Args:
        states: float32 [T,H].
        experts: int64 [T,k], whose weights are used; a number outside of the experts gives zeros.
        shares: float32 [T,k].
        recipe: How they compute.
    """

    states: torch.Tensor
    experts: torch.Tensor
    shares: torch.Tensor
    recipe: Recipe = field(default_factory=Recipe)


def run_experts(weights: LayerWeights, jobs: Sequence[ExpertJob]) -> list[torch.Tensor]:
    """Run the experts of every job: float32 [T,k,H] each, not weighed by their shares."""
    outputs = [torch.zeros(*job.experts.shape, job.states.shape[1]) for job in jobs]
    places = [_places(job.experts) for job in jobs]
    numbers = sorted({number for place in places for number in place})

    def run(number: int) -> None:
        with torch.no_grad():
            asking = [index for index in range(len(jobs)) if number in places[index]]
            matrices = _Matrices(weights, number)
            for same in _by_weights(jobs, asking):
                rows = [places[index][number] for index in same]
                _run_one(matrices, [jobs[index] for index in same], rows, [outputs[index] for index in same])

    with CorePool("diagnosis") as pool:
        list(pool.map(run, numbers))
    return outputs


class _Matrices:
    """Matrices of one expert, each made float32 once for all recipes that leave it as it is."""

    def __init__(self, weights: LayerWeights, number: int) -> None:
        self._weights = weights
        self._number = number
        self._plain: dict[str, torch.Tensor] = {}

    def read(self, recipe: Recipe, matrix: str) -> torch.Tensor:
        if matrix in recipe.changed:
            return recipe.read(self._weights, self._number, matrix)
        if matrix not in self._plain:
            self._plain[matrix] = read_matrix(self._weights, self._number, matrix)
        return self._plain[matrix]


def _run_one(
    matrices: _Matrices,
    jobs: list[ExpertJob],
    rows: list[tuple[torch.Tensor, torch.Tensor]],
    outputs: list[torch.Tensor],
) -> None:
    """Run one expert for jobs that agree on its weights, in one product for all of them."""
    recipe = jobs[0].recipe
    states = torch.cat([job.states[tokens] for job, (tokens, _) in zip(jobs, rows, strict=True)])
    sizes = [len(tokens) for tokens, _ in rows]
    gates = (states @ matrices.read(recipe, EXPERT_GATE).T).split(sizes)
    ups = (states @ matrices.read(recipe, EXPERT_UP).T).split(sizes)
    mixed = [
        job.recipe.mix(gate, up, job.shares[place])
        for job, gate, up, place in zip(jobs, gates, ups, rows, strict=True)
    ]
    downs = (torch.cat(mixed) @ matrices.read(recipe, EXPERT_DOWN).T).split(sizes)
    for output, down, place in zip(outputs, downs, rows, strict=True):
        output[place] = down


def _places(experts: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Find tokens and slots of each expert that is asked for."""
    tokens = torch.arange(experts.shape[0])[:, None].expand_as(experts).flatten()
    slots = torch.arange(experts.shape[1])[None].expand_as(experts).flatten()
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    numbers, counts = flat[order].unique_consecutive(return_counts=True)
    parts = order.split(counts.tolist())
    return {
        number: (tokens[part], slots[part])
        for number, part in zip(numbers.tolist(), parts, strict=True)
        if number >= 0
    }


def _by_weights(jobs: Sequence[ExpertJob], indices: list[int]) -> list[list[int]]:
    """Group the jobs at `indices` that read the same weights."""
    groups: dict[object, list[int]] = {}
    for index in indices:
        recipe = jobs[index].recipe
        key = id(recipe) if recipe.changed else None
        groups.setdefault(key, []).append(index)
    return list(groups.values())
