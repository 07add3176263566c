"""Mistakes of the final norm, on the port's own output of the last layer.

`predict(inputs, correct, **parameters)` of a mistake gets the port's inputs, the correct final norm on them [T,H], and
one of its `candidates`; it returns what a port with the mistake gives, [T,H]. T tokens, H hidden.
"""

from __future__ import annotations

from functools import partial

import torch

from compare.diagnosis.mistake import each, values_of
from compare.diagnosis.model import shards
from compare.diagnosis.model.mistake import ModelInputs, ModelMistake
from minimax_tools.model.sites import ModelSite
from minimax_tools.reference.float32_stages import normalise


def norm_states(inputs: ModelInputs) -> torch.Tensor:
    """Compute the correct final norm, float32 [T,H]; the last layer's output must be held."""
    return _normed(inputs, inputs.weights.final_norm)


def _states(inputs: ModelInputs) -> torch.Tensor:
    """Return the last layer's output, [T,H]."""
    assert inputs.states is not None, "the search asks for predictions only if the states are held"
    return inputs.states


def _normed(inputs: ModelInputs, weight: torch.Tensor) -> torch.Tensor:
    return normalise(_states(inputs), weight, inputs.spec.rms_norm_eps)


def _per_rank(inputs: ModelInputs, _: torch.Tensor, *, tp_degree: int) -> torch.Tensor:
    parts = _states(inputs).unflatten(-1, (tp_degree, -1))
    weights = inputs.weights.final_norm.unflatten(0, (tp_degree, -1))
    return normalise(parts, weights, inputs.spec.rms_norm_eps).flatten(-2)


def _weight_of_rank_0(inputs: ModelInputs, _: torch.Tensor, *, tp_degree: int) -> torch.Tensor:
    weight = inputs.weights.final_norm
    return _normed(inputs, weight[: len(weight) // tp_degree].repeat(tp_degree))


def _centred(inputs: ModelInputs, _: torch.Tensor) -> torch.Tensor:
    states = _states(inputs)
    return normalise(
        states - states.mean(-1, keepdim=True), inputs.weights.final_norm, inputs.spec.rms_norm_eps
    )


_mistake = partial(ModelMistake, site=ModelSite.FINAL_NORM)
FINAL_NORM_MISTAKES = (
    _mistake(
        name="final_norm_one_plus_weight",
        what="The final norm multiplies by 1 + weight.",
        look_at="a norm taken from Gemma's code",
        predict=lambda inputs, _: _normed(inputs, inputs.weights.final_norm + 1.0),
    ),
    _mistake(
        name="final_norm_missing",
        what="There is no final norm.",
        look_at="the input of lm_head",
        predict=lambda inputs, _: _states(inputs),
    ),
    _mistake(
        name="final_norm_unweighted",
        what="The final norm's weight is left out, or all ones.",
        look_at="whether model.norm.weight was loaded",
        predict=lambda inputs, _: _normed(inputs, torch.ones_like(inputs.weights.final_norm)),
    ),
    _mistake(
        name="final_norm_of_a_layer",
        what="The final norm has the weight of a layer's norm.",
        look_at="the name that the final norm's weight is loaded from",
        predict=lambda inputs, _, weight: _normed(inputs, inputs.weights.layer_norms[weight]),
        # Names such as `2.input_layernorm`.
        candidates=each("weight", lambda inputs: inputs.weights.layer_norms),
    ),
    _mistake(
        name="final_norm_per_rank",
        what="Each rank takes the mean square of its own hidden channels alone.",
        look_at="the all-reduce of the sum of squares",
        predict=_per_rank,
        candidates=shards.hidden_degrees,
    ),
    _mistake(
        name="final_norm_weight_of_rank_0",
        what="Every rank multiplies by rank 0's part of the weight.",
        look_at="the rank that cuts the norm's weight",
        predict=_weight_of_rank_0,
        candidates=shards.hidden_degrees,
    ),
    _mistake(
        name="final_norm_eps",
        what="The final norm has another epsilon.",
        look_at="rms_norm_eps",
        predict=lambda inputs, _, eps: normalise(_states(inputs), inputs.weights.final_norm, eps),
        candidates=values_of("eps", 1e-5, 1e-8, 1e-12, 1e-3, 1e-2),
    ),
    _mistake(
        name="final_norm_centred",
        what="The final norm takes the mean off first, as LayerNorm does.",
        look_at="the norm's class",
        predict=_centred,
    ),
    _mistake(
        name="final_norm_twice",
        what="The final norm is applied twice.",
        look_at="a norm within the head",
        predict=lambda inputs, correct: normalise(
            inputs.rounded(correct), inputs.weights.final_norm, inputs.spec.rms_norm_eps
        ),
    ),
    _mistake(
        name="final_norm_weight_alone",
        what="The final norm multiplies by its weight and does not normalise.",
        look_at="the norm's forward",
        predict=lambda inputs, _: _states(inputs) * inputs.weights.final_norm,
    ),
    _mistake(
        name="final_norm_scaled",
        what="The final norm's output is multiplied by a factor.",
        look_at="a scale behind the final norm, or in its weight",
        predict=lambda _, correct, factor: correct * factor,
        candidates=lambda _: (),  # only the factor that fits the port best
        fits_factor=True,
    ),
)
