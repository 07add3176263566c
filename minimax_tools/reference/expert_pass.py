"""Expert pass: the experts of many evaluations at once, and the weights of their layer.

Evaluations share the float32 values of a matrix that none of them changes, gate and up of equal inputs, and what an
expert gives for a token, where all compute it rightly.
T tokens, k experts per token, H hidden, I intermediate, n tokens of one expert, R rows and C columns of a matrix.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from minimax_tools.checkpoint.fp8 import CODE_NUMBERS, decode_codes
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.machine.compiled import CorePool
from minimax_tools.model.graph import LayerGraph, ModelGraph
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    EXPERT_DOWN,
    EXPERT_GATE,
    EXPERT_UP,
    EXPERTS,
    GATE,
    expert_weight,
    layer_prefix,
    scale_name,
)
from minimax_tools.reference.float32_stages import activate

# From a shape to float32 memory of that shape, whatever it holds.
Allocate = Callable[[Sequence[int]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoding:
    """A way to read FP8 matrices: a number for each code, times the scale of its block."""

    numbers: torch.Tensor = CODE_NUMBERS  # number of each code by its byte, float32 [256]
    # From the stored block scales to those that are used, float32 of one shape.
    scales: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales


_AS_MEANT = Decoding()


class LayerWeights:
    """The weights of a layer by the hub's relative names; safe to use from several threads.

    Values are rounded to the dtype of `tensors`, the golden's, before they become float32. Without `keeps`,
    tensors that were read are not kept, but for those that `kept_value` made float32. Tensors that lie in no checkpoint
    have values alone.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, keeps: bool = True) -> None:
        self._tensors = tensors
        self._keeps = keeps
        self._kept: dict[str, torch.Tensor] = {}
        self._float32: dict[str, torch.Tensor] = {}
        self._others: dict[int, LayerWeights] = {}
        self._lock = threading.Lock()

    @property
    def _stored(self) -> LayerTensors:
        assert isinstance(self._tensors, LayerTensors), "generated weights lie in no checkpoint"
        return self._tensors

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the golden computes in."""
        return self._stored.dtype

    @property
    def layer(self) -> int:
        """Number of the layer."""
        return self._stored.layer

    def graph(self, spec: ModelSpec) -> LayerGraph:
        """Return the graph of the layer, told by its weights: a dense one has no router."""
        return LayerGraph(spec.graph, is_dense=GATE not in self._tensors)

    def has_layer(self, layer: int) -> bool:
        """Decide whether the checkpoint that is open here holds another layer of the same kind."""
        held = self._stored.reader.index.entries
        return all(layer_prefix(layer) + name in held for name in self._tensors if EXPERTS not in name)

    def of_layer(self, layer: int) -> LayerWeights:
        """Return the weights of another layer of the same checkpoint; its experts' matrices are read at every use.

        Raises:
            CheckpointError: The checkpoint lacks them.
        """
        with self._lock:
            if layer not in self._others:
                self._others[layer] = LayerWeights(self._stored.of_layer(layer), keeps=False)
            return self._others[layer]

    def is_fp8(self, name: str) -> bool:
        """Decide whether the checkpoint stores the tensor as FP8 codes."""
        tensors = self._tensors
        return isinstance(tensors, LayerTensors) and tensors.stored_dtype(name) == torch.float8_e4m3fn

    def value(
        self, name: str, decoding: Decoding = _AS_MEANT, *, allocate: Allocate = torch.empty
    ) -> torch.Tensor:
        """Read a tensor's values, float32; they are converted at every call, into memory of `allocate`.

        What is kept in float32 is returned itself. A matrix that is not FP8 has no other decoding.
        """
        if not self.is_fp8(name):
            stored = self._keep(name, lambda: self._tensors[name])
            return stored if stored.dtype == torch.float32 else allocate(stored.shape).copy_(stored)
        codes, scales = self.codes(name)
        return decode_codes(
            codes,
            decoding.scales(scales),
            numbers=decoding.numbers,
            dtype=self.dtype,
            out=allocate(codes.shape),
        )

    def kept_value(self, name: str) -> torch.Tensor:
        """Read a tensor's values, float32; they are converted once and kept, which is too much for experts."""
        with self._lock:
            if name not in self._float32:
                self._float32[name] = self.value(name)
            return self._float32[name]

    def codes(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the FP8 codes [R,C] and block scales of a matrix."""
        reader, prefix, scales = self._stored.reader, layer_prefix(self.layer), scale_name(name)
        return (
            self._keep(name, lambda: reader.read(prefix + name)),
            self._keep(scales, lambda: reader.read(prefix + scales)),
        )

    def _keep(self, name: str, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        # Without a lock: two threads may read a tensor twice, and then keep equal values.
        if not self._keeps:
            return read()
        if name not in self._kept:
            self._kept[name] = read()
        return self._kept[name]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertSlots:
    """Slots of one expert, as far as a mistake may use them."""

    graph: ModelGraph
    shares: torch.Tensor  # routing weights, float32 [n]


# From gate [n,I], up [n,I] and the slots to the down projection's input [n,I].
Mix = Callable[[torch.Tensor, torch.Tensor, ExpertSlots], torch.Tensor]
# From the weights, an expert's number, and w1, w2 or w3 to the values of this matrix, float32, in allocated memory.
ReadMatrix = Callable[[LayerWeights, int, str, Allocate], torch.Tensor]
# Indices of one expert in [T,k]: of tokens and of slots, int64 [n] each.
_Slots = tuple[torch.Tensor, torch.Tensor]


def read_matrix(weights: LayerWeights, expert: int, matrix: str, allocate: Allocate) -> torch.Tensor:
    """Read an expert's matrix as the checkpoint means it, float32."""
    return weights.value(expert_weight(expert, matrix), allocate=allocate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Arithmetic of all experts."""

    mix: Mix | None = None  # function that activates the gate and combines it with up; None for the right one
    read: ReadMatrix = read_matrix  # function that reads the matrices named in `changed`
    changed: tuple[str, ...] = ()  # matrices that a mistake reads wrongly, of w1, w2 and w3
    experts: frozenset[int] | None = None  # experts that it is of, others being right; None for all


_RIGHT = Recipe()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertJob:
    """Input of the experts in one evaluation."""

    graph: ModelGraph
    states: torch.Tensor  # input of the experts, float32 [T,H]
    experts: torch.Tensor  # experts whose weights are used, int64 [T,k]; a negative number gives zeros
    shares: torch.Tensor  # routing weights, float32 [T,k]
    recipe: Recipe = _RIGHT  # arithmetic of the experts

    def of(self, expert: int) -> ExpertJob:
        """Return the job with the arithmetic of one expert."""
        experts = self.recipe.experts
        return self if experts is None or expert in experts else replace(self, recipe=_RIGHT)


def run_experts(weights: LayerWeights, jobs: Sequence[ExpertJob]) -> list[torch.Tensor]:
    """Run the experts of every job: float32 [T,k,H] each, before they are multiplied by their shares."""
    outputs = [torch.zeros(*job.experts.shape, job.states.shape[1]) for job in jobs]
    slots = [_slots_by_expert(job.experts) for job in jobs]
    memory = _ThreadMemory()

    def run(expert: int) -> None:
        matrices = _ExpertMatrices(weights, expert, memory)
        asking = [index for index in range(len(jobs)) if expert in slots[index]]
        # Threads of the pool do not inherit the caller's `no_grad`.
        with torch.no_grad():
            own = {index: jobs[index].of(expert) for index in asking}
            for indices in _group_by_weights(own):
                _run_together(
                    matrices,
                    [own[index] for index in indices],
                    slots=[slots[index][expert] for index in indices],
                    outputs=[outputs[index] for index in indices],
                )

    with CorePool("diagnosis") as pool:
        # A list, since the pool raises an expert's error only when its result is taken.
        list(pool.map(run, sorted({expert for of_job in slots for expert in of_job})))
    return outputs


def _slots_by_expert(experts: torch.Tensor) -> dict[int, _Slots]:
    """Find the tokens and slots in [T,k] of each expert that is asked for."""
    tokens = torch.arange(experts.shape[0])[:, None].expand_as(experts).flatten()
    columns = torch.arange(experts.shape[1])[None].expand_as(experts).flatten()
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    numbers, counts = flat[order].unique_consecutive(return_counts=True)
    return {
        number: (tokens[part], columns[part])
        for number, part in zip(numbers.tolist(), order.split(counts.tolist()), strict=True)
        if number >= 0
    }


def _group_by_weights(jobs: Mapping[int, ExpertJob]) -> list[list[int]]:
    """Group the indices of jobs that compute with the same weights; recipes that change no matrix share them."""
    groups: dict[object, list[int]] = {}
    for index, job in jobs.items():
        key = id(job.recipe) if job.recipe.changed else None
        groups.setdefault(key, []).append(index)
    return list(groups.values())


class _ThreadMemory(threading.local):
    """Memory of a thread for matrices: new memory costs more than reading a matrix into it."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def allocator(self, use: str) -> Allocate:
        """Return what allocates memory for one use; it is overwritten when the same use asks again."""

        def allocate(shape: Sequence[int]) -> torch.Tensor:
            size = math.prod(shape)
            if use not in self._kept or len(self._kept[use]) < size:
                self._kept[use] = torch.empty(size)
            return self._kept[use][:size].view(tuple(shape))

        return allocate


class _ExpertMatrices:
    """Matrices of one expert; those that no recipe changes are converted to float32 once."""

    def __init__(self, weights: LayerWeights, expert: int, memory: _ThreadMemory) -> None:
        self._weights = weights
        self._expert = expert
        self._memory = memory
        self._unchanged: dict[str, torch.Tensor] = {}

    def read(self, recipe: Recipe, matrix: str) -> torch.Tensor:
        """Read a matrix; one that the recipe changes lasts until the next such one is read."""
        if matrix in recipe.changed:
            return recipe.read(self._weights, self._expert, matrix, self._memory.allocator("changed"))
        if matrix not in self._unchanged:
            allocate = self._memory.allocator(matrix)
            self._unchanged[matrix] = read_matrix(self._weights, self._expert, matrix, allocate)
        return self._unchanged[matrix]


def _run_together(
    matrices: _ExpertMatrices, jobs: list[ExpertJob], *, slots: list[_Slots], outputs: list[torch.Tensor]
) -> None:
    """Run one expert for jobs that share its weights, in one product for all of them; write into `outputs`."""
    recipe = jobs[0].recipe
    # A mistake of the router, or of what follows gate and up, leaves the input of the experts: such jobs share it.
    groups: dict[int, list[int]] = {}
    for index, job in enumerate(jobs):
        groups.setdefault(id(job.states), []).append(index)
    inputs: list[torch.Tensor] = []
    # By job: the places of its rows among the inputs, then among those of the down projection.
    places: dict[int, torch.Tensor] = {}
    num_rows = 0
    for group in groups.values():
        tokens = slots[group[0]][0]
        if len(group) > 1:
            tokens = torch.cat([slots[index][0] for index in group]).unique()
        for index in group:
            places[index] = num_rows + torch.searchsorted(tokens, slots[index][0])
        inputs.append(jobs[group[0]].states[tokens])
        num_rows += len(tokens)
    states = torch.cat(inputs)
    gate, up = states @ matrices.read(recipe, EXPERT_GATE).T, states @ matrices.read(recipe, EXPERT_UP).T
    mixed = [activate(jobs[0].graph, gate, up)]
    for index, job in enumerate(jobs):
        if job.recipe.mix is not None:
            place = places[index]
            of_expert = ExpertSlots(graph=job.graph, shares=job.shares[slots[index]])
            mixed.append(job.recipe.mix(gate[place], up[place], of_expert))
            places[index] = num_rows + torch.arange(len(place))
            num_rows += len(place)
    down = torch.cat(mixed) @ matrices.read(recipe, EXPERT_DOWN).T
    for index, place in places.items():
        outputs[index][slots[index]] = down[place]
