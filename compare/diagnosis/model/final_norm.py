"""Mistakes of the final norm, on the port's own output of the last layer. T tokens, H hidden."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch

from compare.diagnosis.mistake import Parameters
from compare.diagnosis.model import shards
from compare.diagnosis.model.mistake import ModelCandidates, ModelMistake, once
from compare.diagnosis.model.scene import ModelScene, fit_factor
from minimax_tools.model.sites import ModelSite
from minimax_tools.reference.float32_stages import normalise

_EPSILONS = (1e-5, 1e-8, 1e-12, 1e-3, 1e-2)


def norm_states(scene: ModelScene) -> torch.Tensor | None:
    """Compute the right final norm, float32 [T,H]; None where the last layer's output is not held."""
    return _normed(scene, scene.weights.norm) if scene.states is not None else None


def _states(scene: ModelScene) -> torch.Tensor:
    assert scene.states is not None, "the search asks for predictions where the last layer's output is held"
    return scene.states


def _normed(scene: ModelScene, weight: torch.Tensor) -> torch.Tensor:
    return normalise(_states(scene), weight, scene.spec.rms_norm_eps)


def _plus_one(scene: ModelScene) -> torch.Tensor:
    return _normed(scene, scene.weights.norm + 1.0)


def _missing(scene: ModelScene) -> torch.Tensor:
    return _states(scene)


def _unweighted(scene: ModelScene) -> torch.Tensor:
    return _normed(scene, torch.ones_like(scene.weights.norm))


def _weight_alone(scene: ModelScene) -> torch.Tensor:
    return _states(scene) * scene.weights.norm


def _of_a_layer(scene: ModelScene, *, weight: str) -> torch.Tensor:
    return _normed(scene, dict(scene.weights.layer_norms())[weight])


def _layer_names(scene: ModelScene, _: torch.Tensor) -> tuple[Parameters, ...]:
    return tuple(MappingProxyType({"weight": name}) for name, _ in scene.weights.layer_norms())


def _per_rank(scene: ModelScene, *, tp_degree: int) -> torch.Tensor:
    parts = _states(scene).unflatten(-1, (tp_degree, -1))
    weights = scene.weights.norm.unflatten(0, (tp_degree, -1))
    return normalise(parts, weights, scene.spec.rms_norm_eps).flatten(-2)


def _weight_of_rank_0(scene: ModelScene, *, tp_degree: int) -> torch.Tensor:
    weight = scene.weights.norm
    return _normed(scene, weight[: len(weight) // tp_degree].repeat(tp_degree))


def _other_eps(scene: ModelScene, *, eps: float) -> torch.Tensor:
    return normalise(_states(scene), scene.weights.norm, eps)


def _centred(scene: ModelScene) -> torch.Tensor:
    states = _states(scene)
    return normalise(states - states.mean(-1, keepdim=True), scene.weights.norm, scene.spec.rms_norm_eps)


def _twice(scene: ModelScene) -> torch.Tensor:
    once = scene.rounded(_normed(scene, scene.weights.norm))
    return normalise(once, scene.weights.norm, scene.spec.rms_norm_eps)


def _scaled(scene: ModelScene, *, factor: float) -> torch.Tensor:
    return _normed(scene, scene.weights.norm) * factor


def _factors(scene: ModelScene, port: torch.Tensor) -> tuple[Parameters, ...]:
    right = _normed(scene, scene.weights.norm)
    if port.shape != right.shape:
        # At the logits nothing tells a scaled norm from a scaled head.
        return ()
    fitted = fit_factor(port, right)
    return () if fitted is None else (MappingProxyType({"factor": fitted}),)


def _epsilons(_: ModelScene, __: torch.Tensor) -> tuple[Parameters, ...]:
    return tuple(MappingProxyType({"eps": eps}) for eps in _EPSILONS)


def _entry(
    name: str,
    what: str,
    look_at: str,
    predict: Callable[..., torch.Tensor],
    *,
    candidates: ModelCandidates = once,
) -> ModelMistake:
    return ModelMistake(
        name=name,
        site=ModelSite.FINAL_NORM,
        what=what,
        look_at=look_at,
        predict=predict,
        candidates=candidates,
    )


FINAL_NORM_MISTAKES = (
    _entry(
        "final_norm_one_plus_weight",
        "The final norm multiplies by 1 + weight.",
        "a norm taken from Gemma's code",
        _plus_one,
    ),
    _entry("final_norm_missing", "There is no final norm.", "what the head is fed", _missing),
    _entry(
        "final_norm_unweighted",
        "The final norm's weight is left out, or all ones.",
        "whether model.norm.weight was loaded",
        _unweighted,
    ),
    _entry(
        "final_norm_of_a_layer",
        "The final norm has the weight of a layer's norm.",
        "the name that the final norm's weight is loaded from",
        _of_a_layer,
        candidates=_layer_names,
    ),
    _entry(
        "final_norm_per_rank",
        "Each rank takes the mean square of its own hidden channels alone.",
        "the all-reduce of the sum of squares",
        _per_rank,
        candidates=shards.hidden_degrees,
    ),
    _entry(
        "final_norm_weight_of_rank_0",
        "Every rank multiplies by rank 0's part of the weight.",
        "the rank that cuts the norm's weight",
        _weight_of_rank_0,
        candidates=shards.hidden_degrees,
    ),
    _entry(
        "final_norm_eps",
        "The final norm has another epsilon.",
        "rms_norm_eps",
        _other_eps,
        candidates=_epsilons,
    ),
    _entry(
        "final_norm_centred",
        "The final norm takes the mean off first, as LayerNorm does.",
        "the norm's class",
        _centred,
    ),
    _entry("final_norm_twice", "The final norm is applied twice.", "a norm within the head", _twice),
    _entry(
        "final_norm_weight_alone",
        "The final norm multiplies by its weight and does not normalise.",
        "the norm's forward",
        _weight_alone,
    ),
    _entry(
        "final_norm_scaled",
        "The final norm's output is multiplied by a factor.",
        "a scale behind the final norm, or in its weight",
        _scaled,
        candidates=_factors,
    ),
)
