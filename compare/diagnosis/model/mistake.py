"""ModelMistake: an entry of the catalogue for what lies outside the layers.

T tokens, F channels: H hidden at the embedding and the final norm, C vocabulary columns at the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType

import torch

from compare.diagnosis.mistake import NOTHING, Parameters, Value
from compare.diagnosis.model.scene import ModelScene
from minimax_tools.model.sites import ModelSite

# From the scene and the port's values [T,F] to the parameters that are worth a try.
ModelCandidates = Callable[[ModelScene, torch.Tensor], tuple[Parameters, ...]]


def once(_: ModelScene, __: torch.Tensor) -> tuple[Parameters, ...]:
    """Give the only candidate of a mistake without parameters."""
    return (NOTHING,)


def each(name: str, values: Callable[[ModelScene], Iterable[Value]]) -> ModelCandidates:
    """Build candidates of one parameter: every value that a scene allows."""
    return lambda scene, _: tuple(MappingProxyType({name: value}) for value in values(scene))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMistake:
    """A known mistake of the embedding, the final norm or the head.

    Args:
        name: Its name, as reports give it.
        site: Where it is made.
        what: What the port does, in a sentence.
        look_at: What to look at in the port's code.
        predict: From the scene and its parameters, by name, to the values of the site, float32 [T,F]; None where the
            scene lacks what they are computed from.
        candidates: The parameters to try.
        sources: Public threads that report it, `repository#thread`.
    """

    name: str
    site: ModelSite
    what: str
    look_at: str
    predict: Callable[..., torch.Tensor | None]
    candidates: ModelCandidates = once
    sources: tuple[str, ...] = ()
