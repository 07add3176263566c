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

    `predict` gets the port's own inputs, the correct values on them [T,F], and the parameters, by name. It returns the
    values of a port with the mistake, float32 [T,F], NaN at tokens that it cannot predict; None if an input is
    not held.
    """

    name: str  # name in reports
    site: ModelSite  # site at which the mistake is made
    what: str  # sentence that says what the port does
    look_at: str  # place to look at in the port's code
    predict: Callable[..., torch.Tensor | None]
    candidates: ModelCandidates = once
    fits_factor: bool = False  # whether the `factor` that fits the port best is tried beside the candidates
    sources: tuple[str, ...] = ()  # public threads that report the mistake, as `repository#thread`
