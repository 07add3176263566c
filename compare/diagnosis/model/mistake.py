"""ModelMistake: an entry of the catalogue of mistakes outside the layers.

T tokens, F channels: H hidden at the embedding and the final norm, C vocabulary columns at the logits.

ModelWeights: the checkpoint's tensors outside the layers, and the layers' norms that may stand in for the final one.

Values are rounded to `dtype`, the golden's. V the vocabulary, H hidden.

ModelInputs: what the sites outside the layers, right or mistaken, are computed from.

T judged tokens, H hidden, C judged columns of the vocabulary, F channels of a site: H, or C at the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from compare.diagnosis.mistake import Parameters, once
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model import weight_names
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import head_name

_LAYER_NORMS = (weight_names.INPUT_NORM, weight_names.POST_NORM)


class ModelWeights:
    """Embedding, final norm, head, and norms of the layers; each is read once, when it is first asked for."""

    def __init__(self, reader: CheckpointReader, spec: ModelSpec, *, dtype: torch.dtype) -> None:
        self._reader = reader
        self._spec = spec
        self._dtype = dtype

    @cached_property
    def embedding(self) -> torch.Tensor:
        """The embedding, [V,H] in the golden's dtype; users make rows float32, since the table is large."""
        return self._reader.read_weight(weight_names.EMBEDDING, self._dtype)

    @cached_property
    def head(self) -> torch.Tensor:
        """The head, [V,H] in the golden's dtype; the embedding if the two are tied."""
        return (
            self._reader.read_weight(head_name(self._spec), self._dtype) if self.has_head else self.embedding
        )

    @property
    def has_head(self) -> bool:
        """True if the head is not tied to the embedding."""
        return not self._spec.tie_word_embeddings

    @cached_property
    def final_norm(self) -> torch.Tensor:
        """Weight of the final norm, [H]: float32, in which predictions are computed."""
        return self._reader.read_weight(weight_names.FINAL_NORM, self._dtype).float()

    @cached_property
    def layer_norms(self) -> Mapping[str, torch.Tensor]:
        """Weights of the norms before attention and experts, float32 [H], by names such as `2.input_layernorm`.

        A port may load one of them as its final norm. A folder with a slice of the model lacks the other layers' norms.
        """
        weights = {}
        for layer in range(self._spec.num_hidden_layers):
            for name in _LAYER_NORMS:
                hub_name = weight_names.layer_prefix(layer) + name
                if hub_name in self._reader.index.entries:
                    short_name = f"{layer}.{name.removesuffix('.weight')}"
                    weights[short_name] = self._reader.read_weight(hub_name, self._dtype).float()
        return weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelInputs:
    """Inputs of one side, the golden's or the port's, to the sites outside the layers; a tensor not held is None.

    Judged are some of the real tokens (those that are not padding).
    """

    spec: ModelSpec
    weights: ModelWeights
    columns: torch.Tensor  # columns of the vocabulary that are judged, ascending: int64 [C]
    dtype: torch.dtype  # dtype that the golden computes in
    token_ids: torch.Tensor  # ids of the judged tokens, int64 [T]
    all_token_ids: torch.Tensor  # ids of all real tokens, int64
    previous: torch.Tensor  # index among all real tokens of the token before; -1 for none: int64 [T]
    # For a way to mistake tokens for others, in words: the other's index among all real tokens; -1 for none: int64 [T]
    exchanged: Mapping[str, torch.Tensor] = field(default_factory=dict)
    states: torch.Tensor | None = None  # output of the last layer, float32 [T,H]
    normed: torch.Tensor | None = None  # output of the final norm, float32 [T,H]
    all_normed: torch.Tensor | None = None  # output of the final norm for all real tokens, float32

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Round values to the golden's dtype; return them as float32."""
        return values.to(self.dtype).float()

    def of_others(self, values: torch.Tensor, order: str) -> torch.Tensor:
        """Return the values [T,F] of other tokens, from those of all real ones; NaN where the other is padding."""
        others = self.exchanged[order]
        return values[others].masked_fill((others < 0)[:, None], math.nan)

    def without_first_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Replace [T,F] by NaN at each prompt's first token, which has no token before it."""
        return values.masked_fill((self.previous < 0)[:, None], math.nan)


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
