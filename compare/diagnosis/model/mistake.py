"""ModelMistake: an entry of the catalogue for what lies outside the layers.

T tokens, F channels: H hidden at the embedding and the final norm, C vocabulary columns at the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from compare.diagnosis.mistake import Parameters, once
from compare.diagnosis.model.scene import ModelScene
from minimax_tools.model.sites import ModelSite

# The parameters that are worth a try in a scene.
ModelCandidates = Callable[[ModelScene], tuple[Parameters, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMistake:
    """A known mistake of the embedding, the final norm or the head.

    Args:
        name: Its name, as reports give it.
        site: Where it is made.
        what: What the port does, in a sentence.
        look_at: What to look at in the port's code.
        predict: From the scene, the right values of the site [T,F] and the parameters, by name, to the port's values,
            float32 [T,F]; None where the scene lacks what they are computed from.
        candidates: The parameters to try.
        fits_factor: Whether `factor` is tried too with the value that fits the port best.
        sources: Public threads that report it, `repository#thread`.
    """

    name: str
    site: ModelSite
    what: str
    look_at: str
    predict: Callable[..., torch.Tensor | None]
    candidates: ModelCandidates = once
    fits_factor: bool = False
    sources: tuple[str, ...] = ()
