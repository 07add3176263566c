"""Mistakes of the experts: their activation, which of them compute, and how they add up.

A class is a port's arithmetic with one mistake. `PLANTS` gives each mistake its name in the catalogue, the sites that
must be blamed, and its parameters, which the class reads as `self.parameters` or, as floats, by `self.number`.
T tokens of all prompts, k experts of each. `experts` are their numbers [T,k], and `real` is bool [T], false on padding.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from faults.arithmetic import Arithmetic
from faults.plant import Plant
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import expert_weight

# The sites to blame for a mistake of the experts.
_MOE = (Site.MOE_DELTA,)


class GateUpSwapped(Arithmetic):
    """Gate and up change places."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return super().activate(up, gate)


class UpPlusOne(Arithmetic):
    """The SwiGLU of another model, which adds 1 to up."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return super().activate(gate, up + 1)


class Gelu(Arithmetic):
    """GELU in place of SiLU."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functional.gelu(gate) * up


class Relu(Arithmetic):
    """ReLU in place of SiLU."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functional.relu(gate) * up


class ActivationMissing(Arithmetic):
    """The gate is not activated."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gate * up


class Clamped(Arithmetic):
    """Gate and up are clamped, as another model's are."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return super().activate(
            gate.clamp(max=self.number("limit")), up.clamp(-self.number("limit"), self.number("limit"))
        )


class GateUpInterleaved(Arithmetic):
    """Gate and up are taken to alternate in the fused weight's rows, the last axis of its product."""

    def cut_gate_up(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return both[..., 0::2], both[..., 1::2]


class LocalOnly(Arithmetic):
    """The experts of a single rank compute; the sum over ranks is missing."""

    def affinities(self, experts: torch.Tensor, weights: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(self.config.num_local_experts, device=experts.device)
        is_local: torch.Tensor = (
            numbers // (self.config.num_local_experts // self.parameters.ep_degree) == self.parameters.rank
        )
        return super().affinities(experts, weights, real) * is_local.to(weights.dtype)


class IdsShifted(Arithmetic):
    """A shifted expert computes, not the chosen one."""

    def affinities(self, experts: torch.Tensor, weights: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        shifted = (experts + self.parameters.offset) % self.config.num_local_experts
        return super().affinities(shifted, weights, real)


class TextOrder(Arithmetic):
    """The experts are stacked in the order of their numbers as text: 0, 1, 10, 11, …, 2."""

    def fuse(self, tensors: LayerTensors) -> dict[str, torch.Tensor]:
        state = super().fuse(tensors)
        order = sorted(range(self.config.num_local_experts), key=str)
        return {**state, "gate_up": state["gate_up"][order], "down": state["down"][order]}


class Exchanged(Arithmetic):
    """Two experts hold each other's weights."""

    def edit(self, tensors: LayerTensors) -> None:
        for matrix in ("w1", "w2", "w3"):
            names = [
                expert_weight(expert, matrix) for expert in (self.parameters.first, self.parameters.second)
            ]
            values = [tensors[name] for name in names]
            for name, value in zip(names, reversed(values), strict=True):
                tensors[name] = value


class UpClamped(Arithmetic):
    """The up projection alone is clamped."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        limit = self.number("limit")
        least = -limit if self.parameters.side == "both" else None
        return super().activate(gate, up.clamp(min=least, max=limit))


class Capacity(Arithmetic):
    """An expert takes `factor` times its even share of the tokens, the first ones; it drops the others."""

    def affinities(self, experts: torch.Tensor, weights: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        wanted = super().affinities(experts, weights, real) * real[:, None]
        share = self.number("factor") * self.config.num_experts_per_tok / self.config.num_local_experts
        capacity = (real.sum() * share).ceil()
        return torch.where((wanted > 0).cumsum(0) <= capacity, wanted, 0.0)


class MoeScaled(Arithmetic):
    """The output is multiplied by `factor`: 2 if two ranks' sums are reduced twice, or another wrong scale."""

    def finish_moe(self, moe: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return moe * self.number("factor")


class WidthPartial(Arithmetic):
    """A single rank's slice of the experts' width computes; the sum over ranks is missing."""

    def activated(self, tokens: torch.Tensor, slab: slice) -> torch.Tensor:
        inner = super().activated(tokens, slab)
        width = inner.shape[-1] // self.parameters.tp_degree
        is_local: torch.Tensor = (
            torch.arange(inner.shape[-1], device=inner.device) // width == self.parameters.rank
        )
        return inner * is_local.to(inner.dtype)


class LowPrecisionSum(Arithmetic):
    """The sum is rounded to BF16 after each expert."""

    def accumulate(self, total: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        for output in outputs:
            total = (total + output).bfloat16().float()
        return total


# `decodes`: planted in decoded tokens alone too. A few of the mistakes are, because each takes a run more.
PLANTS = (
    Plant("gate_up_swapped", _MOE, GateUpSwapped, decodes=True),
    Plant("up_plus_one", _MOE, UpPlusOne),
    Plant("gelu_activation", _MOE, Gelu, decodes=True),
    Plant("relu_activation", _MOE, Relu),
    Plant("activation_missing", _MOE, ActivationMissing),
    Plant("swiglu_clamped", _MOE, Clamped, {"limit": 1.0}),
    Plant("swiglu_clamped", _MOE, Clamped, {"limit": 7.0}),
    Plant("up_clamped", _MOE, UpClamped, {"limit": 1.0, "side": "above"}, decodes=True),
    Plant("up_clamped", _MOE, UpClamped, {"limit": 0.7, "side": "both"}),
    Plant("experts_exchanged", _MOE, Exchanged, {"first": 5, "second": 6}),
    Plant("gate_up_interleaved", _MOE, GateUpInterleaved),
    Plant("experts_local_only", _MOE, LocalOnly, {"ep_degree": 4, "rank": 0}, decodes=True),
    Plant("expert_ids_shifted", _MOE, IdsShifted, {"offset": 1}),
    Plant("experts_in_text_order", _MOE, TextOrder),
    Plant("expert_capacity", _MOE, Capacity, {"factor": 1.0}),
    Plant("expert_capacity", _MOE, Capacity, {"factor": 1.25}),
    Plant("moe_delta_scaled", _MOE, MoeScaled, {"factor": 2.0}, decodes=True),
    Plant("moe_delta_scaled", _MOE, MoeScaled, {"factor": 0.97}),
    Plant("experts_width_partial", _MOE, WidthPartial, {"tp_degree": 2, "rank": 0}),
    Plant("expert_accumulation_low_precision", _MOE, LowPrecisionSum),
)
