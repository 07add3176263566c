"""Mistakes of the router: the experts' scores, their choice, and the weights of the chosen.

T tokens, E experts, k experts per token. `layer[site]` is a value of the layer with the mistake.
`candidates`: parameters of `build` that are tried. `fitted`: the parameter that is also searched between them.
Of two mistakes that explain an output alike, the earlier in `ROUTER_MISTAKES` is named.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from compare.diagnosis.catalogue import repairs
from compare.diagnosis.catalogue.low_bits import bfloat16, fp8_blocks, integer_groups
from compare.diagnosis.evaluation import Change, Evaluation, ExpertValue, LayerInputs, Stage, replace_stage
from compare.diagnosis.expert_pass import Recipe
from compare.diagnosis.mistake import Mistake, Parameters, each, values_of
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site
from minimax_tools.reference.float32_stages import (
    choose_experts,
    correction_bias,
    expert_shares,
    router_scores,
)

# From the layer to one number for each token and expert, [T,E].
_Scores = Callable[[Evaluation], torch.Tensor]


def _choose_by(choice: _Scores, scores: _Scores | None = None) -> Change:
    """Choose experts by the scores `choice`; if `scores` are given, weigh the chosen ones by these."""
    stages: dict[Site | ExpertValue, Stage] = {
        Site.ROUTER_EXPERTS: lambda layer: choose_experts(choice(layer), layer.spec.num_experts_per_tok)
    }
    if scores is not None:
        stages[Site.ROUTER_WEIGHTS] = lambda layer: expert_shares(scores(layer), layer[Site.ROUTER_EXPERTS])
    return Change(stages=stages)


def _weigh_by(weights: Callable[[Evaluation, torch.Tensor], torch.Tensor]) -> Change:
    """Weigh the chosen experts in another way: `weights` gets the layer and the experts, int64 [T,k]."""
    return replace_stage(Site.ROUTER_WEIGHTS, lambda layer: weights(layer, layer[Site.ROUTER_EXPERTS]))


def _softmax(layer: Evaluation) -> torch.Tensor:
    return layer[Site.ROUTER_LOGITS].softmax(-1)


def _top_k(k: int) -> Change:
    """Choose another number of experts."""
    return replace_stage(
        Site.ROUTER_EXPERTS, lambda layer: choose_experts(router_scores(layer) + correction_bias(layer), k)
    )


def _logits_by(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Change:
    """Compute the logits [T,E] by `product`, from the router's input [T,H] and the gate's weight [E,H] (H hidden)."""
    return replace_stage(
        Site.ROUTER_LOGITS, lambda layer: product(layer[Site.POST_NORM], layer.weight(weight_names.GATE))
    )


def _quantised(bits: int, scales: str = "blocks") -> Change:
    """Quantise the gate: FP8 with a scale per block of 128 x 128 or `tensor`, 4 bits per 128 of a row or per row."""

    def quantise(gate: torch.Tensor) -> torch.Tensor:
        if bits == 8:
            return fp8_blocks(gate, block=max(gate.shape) if scales == "tensor" else 128)
        return integer_groups(gate, gate.shape[1] if scales == "rows" else 128, largest=7.0)

    return _logits_by(lambda states, gate: states @ quantise(gate).T)


def _weights_on_input() -> Change:
    """Multiply each expert's input, and so its gate and up, by its routing weight, and not its output."""

    # For the tokens of one expert: gate and up [n,I], its routing weights [n].
    def mix(gate: torch.Tensor, up: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate * shares[:, None]) * (up * shares[:, None])

    return Change(
        stages={Site.MOE_DELTA: lambda layer: layer[ExpertValue.EXPERT_OUTPUTS].sum(1)},
        recipe=Recipe(mix=mix),
    )


def _other_ks(inputs: LayerInputs) -> tuple[int, ...]:
    k, num_experts = inputs.spec.num_experts_per_tok, inputs.spec.num_local_experts
    ks = (1, 2, k // 2, k - 1, k + 1, 2 * k, k - 2, k + 2)
    return tuple(dict.fromkeys(other for other in ks if 0 < other <= num_experts and other != k))


def _quantisations(_: LayerInputs) -> tuple[Parameters, ...]:
    return ({"bits": 8}, {"bits": 4}, {"bits": 8, "scales": "tensor"}, {"bits": 4, "scales": "rows"})


ROUTER_MISTAKES = (
    Mistake(
        name="router_softmax",
        what="Experts are scored by softmax, not by sigmoid.",
        look_at="the router's activation (scoring_func)",
        build=lambda: _choose_by(lambda layer: _softmax(layer) + correction_bias(layer), _softmax),
        sources=("llama.cpp#18980", "mlx-swift-lm#332"),
    ),
    Mistake(
        name="router_bias_missing",
        what="The correction bias takes no part in the choice: it was dropped, or is still zero.",
        look_at="whether e_score_correction_bias is bound, and not folded as a constant",
        build=lambda: _choose_by(router_scores),
        sources=("TensorRT-LLM#13294", "sglang#10440"),
    ),
    Mistake(
        name="router_bias_low_precision",
        what="The correction bias is held in BF16, in steps of 0.03 to 0.06 where it is 4 to 16.",
        look_at="the dtype of e_score_correction_bias after loading",
        build=lambda: _choose_by(lambda layer: router_scores(layer) + bfloat16(correction_bias(layer))),
        sources=("sglang#31213", "transformers#42580", "vllm#50761", "Automodel#2553"),
    ),
    Mistake(
        name="router_choice_low_precision",
        what="The biased scores are compared in BF16.",
        look_at="the dtype in which the correction bias is added to the scores",
        build=lambda: _choose_by(lambda layer: bfloat16(router_scores(layer) + correction_bias(layer))),
    ),
    Mistake(
        name="router_bias_negated",
        what="The correction bias is subtracted.",
        look_at="the sign of e_score_correction_bias",
        build=lambda: _choose_by(lambda layer: router_scores(layer) - correction_bias(layer)),
        repair=repairs.CORRECTION_BIAS_NEGATED,
    ),
    Mistake(
        name="router_bias_in_weights",
        what="The biased scores weigh the chosen experts.",
        look_at="from which scores the weights are gathered",
        build=lambda: _weigh_by(
            lambda layer, experts: expert_shares(router_scores(layer) + correction_bias(layer), experts)
        ),
        sources=("transformers#39581", "PaddleFormers#3452"),
    ),
    Mistake(
        name="router_weights_not_normalised",
        what="The chosen scores are not divided by their sum.",
        look_at="norm_topk_prob, or the division by the sum",
        build=lambda: _weigh_by(lambda layer, experts: router_scores(layer).gather(-1, experts)),
        sources=("torchtitan#1418", "torchtitan#1448"),
    ),
    Mistake(
        name="router_weights_scaled",
        what="The weights of the chosen experts are off by a factor.",
        look_at="routed_scaling_factor",
        build=lambda factor: _weigh_by(
            lambda layer, experts: factor * expert_shares(router_scores(layer), experts)
        ),
        candidates=values_of("factor", 2.0, 0.5, 2.5, 4.0, 8.0, 0.25, 0.125, 1.5),
        fitted="factor",
    ),
    Mistake(
        name="router_top_k",
        what="Another number of experts than num_experts_per_tok is chosen.",
        look_at="the k of top-k",
        build=_top_k,
        candidates=each("k", _other_ks),
    ),
    Mistake(
        name="router_low_precision",
        what="The gate's product is computed in BF16.",
        look_at="the dtype of the router's gate and of its input",
        build=lambda: _logits_by(lambda states, gate: (states.bfloat16() @ gate.bfloat16().T).float()),
        sources=("tt-metal#47430", "vllm-ascend#17068", "vllm#41332"),
    ),
    Mistake(
        name="router_gate_low_precision",
        what="The gate's weight was rounded to BF16; its product is computed in float32.",
        look_at="the dtype to which the loader casts the router's gate",
        build=lambda: _logits_by(lambda states, gate: states @ bfloat16(gate).T),
    ),
    Mistake(
        name="router_quantised",
        what="The gate's weight was quantised with the linear layers.",
        look_at="the names in the quantiser's skip list: block_sparse_moe.gate",
        build=_quantised,
        candidates=_quantisations,
        sources=("auto-round#1486",),
    ),
    Mistake(
        name="router_weights_on_input",
        what="An expert's weight scales its input, not its output.",
        look_at="apply_router_weight_on_input and the like",
        build=_weights_on_input,
    ),
    Mistake(
        name="router_softmax_of_chosen",
        what="The chosen experts are weighed by the softmax of their logits.",
        look_at="how the chosen scores are normalised",
        build=lambda: _weigh_by(
            lambda layer, experts: layer[Site.ROUTER_LOGITS].gather(-1, experts).softmax(-1)
        ),
    ),
    Mistake(
        name="router_weights_uniform",
        what="All chosen experts weigh the same.",
        look_at="whether the weights reach the combination of the experts' outputs",
        build=lambda: _weigh_by(lambda layer, experts: torch.full(experts.shape, 1.0 / experts.shape[-1])),
    ),
    Mistake(
        name="router_sigmoid_missing",
        what="Raw logits and the bias choose the experts; no sigmoid comes between.",
        look_at="what the correction bias is added to",
        build=lambda: _choose_by(lambda layer: layer[Site.ROUTER_LOGITS] + correction_bias(layer)),
    ),
)
