"""ModelMistake: an entry of the catalogue of mistakes outside the layers.

T tokens, F channels: H hidden at the embedding and the final norm, C vocabulary columns at the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from compare.diagnosis.mistake import Parameters, once
from compare.diagnosis.model.inputs import ModelInputs
from minimax_tools.model.sites import ModelSite

# From the inputs to the parameters that are worth a try on them.
ModelCandidates = Callable[[ModelInputs], tuple[Parameters, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMistake:
    """A known mistake of the embedding, the final norm or the head.

    Args:
        name: Name of the mistake in reports.
        site: Site at which the mistake is made.
        what: Sentence that says what the port does.
        look_at: Place to look at in the port's code.
        predict: Function from the inputs, the right values of the site [T,F], and the parameters, by name, to the
            port's values, float32 [T,F]. It returns None if an input is not held.
        candidates: Function from the inputs to the parameters to try.
        fits_factor: Whether the value of `factor` that fits the port best is tried too.
        sources: Public threads that report the mistake, as `repository#thread`.
    """

    name: str
    site: ModelSite
    what: str
    look_at: str
    predict: Callable[..., torch.Tensor | None]
    candidates: ModelCandidates = once
    fits_factor: bool = False
    sources: tuple[str, ...] = ()
