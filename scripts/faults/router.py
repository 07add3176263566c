"""Mistakes of the router."""

from __future__ import annotations

import math

import torch

from faults.arithmetic import Arithmetic
from faults.plant import Plant
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import GATE

_LOGITS, _EXPERTS, _WEIGHTS = (Site.ROUTER_LOGITS,), (Site.ROUTER_EXPERTS,), (Site.ROUTER_WEIGHTS,)
_BLOCK = 128  # rows and columns of an FP8 block with one scale
_GROUP = 128  # numbers of a row in an INT4 group with one scale


class Softmax(Arithmetic):
    """The scoring function of another model is used."""

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1)


class BiasMissing(Arithmetic):
    """The correction bias is dropped."""

    def bias(self) -> torch.Tensor:
        return torch.zeros_like(super().bias())


class BiasLowPrecision(Arithmetic):
    """The correction bias is held in BF16."""

    def bias(self) -> torch.Tensor:
        return super().bias().bfloat16().float()


class BiasNegated(Arithmetic):
    """The correction bias is subtracted."""

    def bias(self) -> torch.Tensor:
        return -super().bias()


class BiasInWeights(Arithmetic):
    """Biased scores weigh the experts."""

    def weigh(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return self.balance((self.scores(logits) + self.bias()).gather(-1, experts))


class NotNormalised(Arithmetic):
    """The weights are not divided by their sum."""

    def balance(self, chosen: torch.Tensor) -> torch.Tensor:
        return chosen


class WeightsScaled(Arithmetic):
    """The routing weights are scaled, as in another model."""

    def balance(self, chosen: torch.Tensor) -> torch.Tensor:
        return super().balance(chosen) * self.number("factor")


class OtherTopK(Arithmetic):
    """Another number of experts is chosen."""

    def best(self, biased: torch.Tensor) -> torch.Tensor:
        return biased.topk(self.parameters.k, dim=-1).indices


class LowPrecisionGate(Arithmetic):
    """The product of the gate is in BF16."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens.bfloat16() @ self.weights.gate.bfloat16().T).float()


class RoundedGate(Arithmetic):
    """The gate's weight is rounded to BF16, and multiplied in float32."""

    def edit(self, tensors: LayerTensors) -> None:
        tensors[GATE] = tensors[GATE].bfloat16().float()


class Quantised(Arithmetic):
    """The router's gate is quantised too, as if it were missing from the modules that must not be."""

    def edit(self, tensors: LayerTensors) -> None:
        gate = tensors[GATE]
        tensors[GATE] = _as_fp8(gate) if self.parameters.bits == 8 else _as_int4(gate)


class WeightsOnInput(Arithmetic):
    """The routing weights (`shares` [slab,T,1], 0 if not chosen) multiply the experts' input, not their output."""

    def expert_outputs(self, tokens: torch.Tensor, slab: slice, shares: torch.Tensor) -> torch.Tensor:
        weighed = tokens * shares.to(tokens.dtype)
        return super().expert_outputs(weighed, slab, (shares != 0).float())


class SoftmaxOfChosen(Arithmetic):
    """The chosen logits' softmax weighs the experts."""

    def weigh(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return logits.gather(-1, experts).softmax(-1)


class WeightsUniform(Arithmetic):
    """The chosen experts have equal weights."""

    def balance(self, chosen: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(chosen) / chosen.shape[-1]


class SigmoidMissing(Arithmetic):
    """Raw logits plus the bias choose the experts; their weights are right."""

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def weigh(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return self.balance(logits.sigmoid().gather(-1, experts))


# Of each: name, sites that are wrong although their inputs are right, class and its parameters. With `decodes`, it is
# also planted in decoded tokens alone.
PLANTS = (
    Plant("router_softmax", (*_EXPERTS, *_WEIGHTS), Softmax, decodes=True),
    Plant("router_bias_missing", _EXPERTS, BiasMissing, decodes=True),
    Plant("router_bias_low_precision", _EXPERTS, BiasLowPrecision),
    Plant("router_bias_negated", _EXPERTS, BiasNegated),
    Plant("router_bias_in_weights", _WEIGHTS, BiasInWeights, decodes=True),
    Plant("router_weights_not_normalised", _WEIGHTS, NotNormalised),
    Plant("router_weights_scaled", _WEIGHTS, WeightsScaled, {"factor": 2.5}, decodes=True),
    Plant("router_weights_scaled", _WEIGHTS, WeightsScaled, {"factor": 0.95}),
    Plant("router_top_k", _EXPERTS, OtherTopK, {"k": 3}),
    Plant("router_top_k", _EXPERTS, OtherTopK, {"k": 2}),
    Plant("router_low_precision", _LOGITS, LowPrecisionGate),
    Plant("router_gate_low_precision", _LOGITS, RoundedGate),
    Plant("router_quantised", _LOGITS, Quantised, {"bits": 8}),
    Plant("router_quantised", _LOGITS, Quantised, {"bits": 4}),
    Plant("router_weights_on_input", (Site.MOE_DELTA,), WeightsOnInput),
    Plant("router_softmax_of_chosen", _WEIGHTS, SoftmaxOfChosen),
    Plant("router_weights_uniform", _WEIGHTS, WeightsUniform),
    Plant("router_sigmoid_missing", _EXPERTS, SigmoidMissing),
)


def _as_fp8(weight: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 and back, with a scale per block of 128 × 128."""
    result = torch.empty_like(weight)
    for top in range(0, weight.shape[0], _BLOCK):
        for left in range(0, weight.shape[1], _BLOCK):
            block = (slice(top, top + _BLOCK), slice(left, left + _BLOCK))
            scale = weight[block].abs().amax() / torch.finfo(torch.float8_e4m3fn).max
            result[block] = (weight[block] / scale).to(torch.float8_e4m3fn).float() * scale
    return result


def _as_int4(weight: torch.Tensor) -> torch.Tensor:
    """Round to whole numbers from -7 to 7 and back, with a scale per 128 numbers of a row."""
    groups = weight.unflatten(-1, (-1, math.gcd(_GROUP, weight.shape[-1])))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    rounded: torch.Tensor = (groups / scale).round().clamp(-7, 7) * scale
    return rounded.flatten(-2)
