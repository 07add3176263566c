"""Figures of regrouping: experts of the true size, copied from single matrices into the layouts of ports.

Matrices and storage lie in memory that was written before: neither the disk nor new pages count. As when a layer is
loaded, each of torch's threads copies one matrix at a time.

E experts, I intermediate size, H hidden size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from timeit import timeit

import torch
from figures import Figure

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_loader import down_places, gate_up_places
from minimax_tools.checkpoint.layer_tensors import copy_weight
from minimax_tools.machine.memory import MemoryUsage
from minimax_tools.model.weight_names import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, expert_weight
from minimax_tools.synthetic.toy_model import SyntheticModel

# A layer has 256: 7 GB, which are held twice.
_NUM_EXPERTS = {"full": 256, "toy": 1}
_REPEATS = 5
_CLEAR_REFS = Path("/proc/self/clear_refs")
# This value resets the kernel's peak of resident memory.
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Experts in one tensor."""

    flat: torch.Tensor  # all values, BF16
    # Views of `flat`: w1 [I,H], w3 [I,H] and w2 [H,I] of each expert, by the hub's relative names.
    matrices: Mapping[str, torch.Tensor]
    num_experts: int  # E
    intermediate_size: int  # I
    hidden_size: int  # H

    @classmethod
    def draw(cls, num_experts: int) -> Experts:
        """Draw experts of MiniMax-M2's size with random BF16 bits."""
        spec = SyntheticModel.m2().spec()
        inner, hidden = spec.intermediate_size, spec.hidden_size
        size = inner * hidden
        flat = torch.randint(-(2**15), 2**15, (3 * num_experts * size,), dtype=torch.int16)
        values = flat.view(torch.bfloat16)
        shapes = {EXPERT_GATE: (inner, hidden), EXPERT_UP: (inner, hidden), EXPERT_DOWN: (hidden, inner)}
        parts = iter(values.split(size))
        matrices = {
            expert_weight(expert, name): next(parts).view(shape)
            for expert in range(num_experts)
            for name, shape in shapes.items()
        }
        return cls(
            flat=values,
            matrices=matrices,
            num_experts=num_experts,
            intermediate_size=inner,
            hidden_size=hidden,
        )

    def group(self, storage: torch.Tensor, pool: ReadingPool) -> None:
        """Fill `storage`, of the size of `flat`, with gate and up [E,2·I,H], then down [E,H,I]."""
        gate_up, down = self._divide(storage)
        count, inner, hidden = self.num_experts, self.intermediate_size, self.hidden_size
        self._group(gate_up.view(count, 2 * inner, hidden), down.view(count, hidden, inner), pool)

    def group_transposed(self, storage: torch.Tensor, pool: ReadingPool) -> None:
        """Fill `storage`, of the size of `flat`, with gate and up [E,H,2·I], then down [E,I,H]: NxDI's layout."""
        gate_up, down = self._divide(storage)
        count, inner, hidden = self.num_experts, self.intermediate_size, self.hidden_size
        self._group(gate_up.view(count, hidden, 2 * inner).mT, down.view(count, inner, hidden).mT, pool)

    def _divide(self, storage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Divide the storage into that of gate and up, and that of down."""
        # Two of an expert's three matrices, all of one size, are gate and up.
        third = storage.numel() // 3
        return storage[: 2 * third], storage[2 * third :]

    def _group(self, gate_up: torch.Tensor, down: torch.Tensor, pool: ReadingPool) -> None:
        experts, dtype = range(self.num_experts), self.flat.dtype
        places = gate_up_places(experts, gate_up, dtype=dtype) | down_places(experts, down, dtype=dtype)
        pool.fill(places, lambda name, place: copy_weight(name, self.matrices[name], place)).finish()


def measure(scale: str) -> Iterator[Figure]:
    """Yield the figures of the untransposed layout, and of that of NxDI (NxD Inference)."""
    experts = Experts.draw(_NUM_EXPERTS[scale])
    with ReadingPool(torch.get_num_threads()) as pool:
        peak_bytes = _peak_above(lambda: experts.group(torch.empty_like(experts.flat), pool))
        yield Figure.at_most("regroup_peak_over_output", peak_bytes / experts.flat.nbytes, 1.02)
        storage = torch.zeros_like(experts.flat)
        for name, group, limit in (
            ("regroup_over_memcpy", experts.group, 1.5),
            ("regroup_transposed_over_memcpy", experts.group_transposed, 4.0),
        ):
            yield Figure.at_most(name, _over_memcpy(partial(group, storage, pool), experts, storage), limit)


def _over_memcpy(group: Callable[[], None], experts: Experts, storage: torch.Tensor) -> float:
    """Measure the time of grouping over that of a plain copy of as many bytes, in alternation."""
    ratios = []
    for _ in range(_REPEATS):
        copied_s = timeit(lambda: storage.copy_(experts.flat), number=1)
        ratios.append(timeit(group, number=1) / copied_s)
    return statistics.median(ratios)


def _peak_above(action: Callable[[], object]) -> int:
    """Measure the peak of resident memory during an action, in bytes above the memory before."""
    _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    before = MemoryUsage.on_host().most_resident_bytes
    action()
    after = MemoryUsage.on_host().most_resident_bytes
    if before is None or after is None:
        raise RuntimeError("the kernel does not tell of this process's highest resident memory")
    return after - before
