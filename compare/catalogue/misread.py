"""Mistakes of weights that are read wrongly: FP8 codes and their block scales, and another layer's weights.

Tensors are named as in reports: the attention's projections, and the experts' matrices w1, w2 and w3.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from compare.catalogue.candidates import each, once_if
from compare.catalogue.low_bits import fp8_groups
from compare.catalogue.mistake import Mistake
from minimax_tools.checkpoint.fp8 import CODE_NUMBERS
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS, EXPERT_MATRICES, expert_weight
from minimax_tools.reference.evaluation import Change, Evaluation, ExpertValue, GraphNode, LayerInputs, Stage
from minimax_tools.reference.expert_pass import (
    Allocate,
    Decoding,
    ExpertSlots,
    LayerWeights,
    Recipe,
    read_matrix,
)
from minimax_tools.reference.float32_stages import (
    NORMS,
    PROJECTIONS,
    activate,
    gain_of,
    normalise,
    product_stage,
    router_of,
    router_scores,
)

# Sites at which a wrongly read projection shows.
_SITES = {"q_proj": Site.Q_PROJ, "k_proj": Site.K_PROJ, "v_proj": Site.V_PROJ, "o_proj": Site.ATTN_DELTA}
_TENSORS = (*_SITES, *EXPERT_MATRICES)


def _decode_with(decoding: Decoding, *tensors: str) -> Change:
    def decode(layer: Evaluation, name: str) -> torch.Tensor:
        return layer.weights.value(name, decoding)

    sites = [_SITES[tensor] for tensor in tensors if tensor in _SITES]
    stages: dict[GraphNode, Stage] = {site: product_stage(*PROJECTIONS[site], read=decode) for site in sites}
    matrices = tuple(tensor for tensor in tensors if tensor in EXPERT_MATRICES)
    if not matrices:
        return Change(stages=stages)

    def read(weights: LayerWeights, expert: int, matrix: str, allocate: Allocate) -> torch.Tensor:
        return weights.value(expert_weight(expert, matrix), decoding, allocate=allocate)

    return Change(stages=stages, recipe=Recipe(read=read, changed=matrices))


_WITHOUT_SCALES = Decoding(scales=torch.ones_like)
_SCALES_AVERAGED = Decoding(scales=lambda scales: scales.mean().expand(scales.shape))
_SCALES_ROUNDED_UP_TO_POWERS_OF_TWO = Decoding(scales=lambda scales: torch.exp2(scales.log2().ceil()))
_SCALES_TRANSPOSED = Decoding(scales=lambda scales: scales.T.reshape(scales.shape))
_CODES_AS_INTEGERS = Decoding(numbers=torch.arange(256, dtype=torch.float32))


def _activations_quantised() -> Change:
    """Quantise the input of the experts, and the input of their down projection."""

    def mix(gate: torch.Tensor, up: torch.Tensor, slots: ExpertSlots) -> torch.Tensor:
        return fp8_groups(activate(slots.graph, gate, up))

    return Change(
        stages={ExpertValue.EXPERT_INPUT: lambda layer: fp8_groups(layer[Site.POST_NORM])},
        recipe=Recipe(mix=mix),
    )


def has_fp8_weights(inputs: LayerInputs) -> bool:
    """Decide whether the checkpoint stores matrices of the layer in FP8."""
    return bool(_fp8_tensors(inputs))


def _fp8_tensors(inputs: LayerInputs) -> tuple[str, ...]:
    """List the tensors that the checkpoint stores in FP8; expert 0 stands for all experts."""
    # `PROJECTIONS` holds the input and the weight's name of each site.
    names = {
        **{tensor: PROJECTIONS[site][1] for tensor, site in _SITES.items()},
        **({} if inputs.graph.is_dense else {name: expert_weight(0, name) for name in EXPERT_MATRICES}),
    }
    return tuple(tensor for tensor, name in names.items() if inputs.weights.is_fp8(name))


def _of_tensor(name: str, decoding: Decoding) -> Mistake:
    """Build a mistake that is made in one tensor; every tensor that is stored in FP8 is a candidate."""
    return Mistake(
        name=name,
        build=lambda tensor: _decode_with(decoding, tensor),
        candidates=each("tensor", _fp8_tensors),
    )


def _is_all_fp8(inputs: LayerInputs) -> bool:
    return len(_fp8_tensors(inputs)) == len(_TENSORS)


def _of_layer(source_layer: int) -> Change:
    def take(layer: Evaluation, name: str) -> torch.Tensor:
        return layer.weights.of_layer(source_layer).kept_value(name)

    def norm(source: Site, weight: str) -> Stage:
        return lambda layer: normalise(
            layer[source], gain_of(layer.graph.model, take(layer, weight)), layer.spec.rms_norm_eps
        )

    def choose(layer: Evaluation) -> torch.Tensor:
        router = router_of(layer)
        if router.bias is not None:
            router = replace(router, bias=take(layer, CORRECTION_BIAS))
        return router.choose(router_scores(layer))

    stages: dict[GraphNode, Stage] = {
        **{site: norm(source, weight) for site, (source, weight) in NORMS.items()},
        **{site: product_stage(*place, read=take) for site, place in PROJECTIONS.items()},
        Site.ROUTER_EXPERTS: choose,
    }

    def read(weights: LayerWeights, expert: int, matrix: str, allocate: Allocate) -> torch.Tensor:
        return read_matrix(weights.of_layer(source_layer), expert, matrix, allocate)

    recipe = Recipe(read=read, changed=EXPERT_MATRICES)
    return Change(stages=stages, recipe=recipe)


def _likely_layers(inputs: LayerInputs) -> list[int]:
    """List the layers whose weights are likeliest to be taken for this one's, as far as the checkpoint has them."""
    count, layer = inputs.spec.num_hidden_layers, inputs.weights.layer
    as_text = sorted(range(count), key=str)
    likely = (layer - 1, layer + 1, as_text[layer], as_text.index(layer), 0)
    return [
        other
        for other in dict.fromkeys(likely)
        if other != layer and 0 <= other < count and inputs.weights.has_layer(other)
    ]


MISREAD_MISTAKES = (
    _of_tensor("fp8_scale_missing", _WITHOUT_SCALES),
    _of_tensor("fp8_scale_averaged", _SCALES_AVERAGED),
    Mistake(
        name="fp8_clipped",
        build=lambda limit: _decode_with(Decoding(numbers=CODE_NUMBERS.clamp(-limit, limit)), *_TENSORS),
        candidates=each("limit", lambda inputs: (240,) if _is_all_fp8(inputs) else ()),
    ),
    Mistake(
        name="fp8_scale_power_of_two",
        build=lambda: _decode_with(_SCALES_ROUNDED_UP_TO_POWERS_OF_TWO, *_TENSORS),
        candidates=once_if(_is_all_fp8),
    ),
    _of_tensor("fp8_scale_transposed", _SCALES_TRANSPOSED),
    _of_tensor("fp8_codes_as_integers", _CODES_AS_INTEGERS),
    Mistake(name="fp8_activations", build=_activations_quantised, is_rounding=True),
    Mistake(
        name="weights_of_another_layer", build=_of_layer, candidates=each("source_layer", _likely_layers)
    ),
)
