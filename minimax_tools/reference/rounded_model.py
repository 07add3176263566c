"""RoundedModel: copies of the whole model computed side by side, each with its own kind of rounding.

The copies are those of `RoundedLayer`, chained from the embedding to the logits; each chooses its own experts, the last
ones with plausible flips. The others' distance from the exact copy is the noise that a right port gathers on its way
through all layers. One layer's weights are in memory at a time.
B batch, S sequence, R rows of all copies (copies · B), C copies, H hidden, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors, ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.machine.progress import NoProgress, Progress
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EMBEDDING, FINAL_NORM, LM_HEAD
from minimax_tools.reference.plausible_flips import FLIP_SHARES, PlausibleFlips
from minimax_tools.reference.rounded_layer import RoundedLayer
from minimax_tools.reference.rounding import Float32Head, Rounding, RoundingKind, rounded_rows

# Seed of the head's random steps; a layer's is its number.
_HEAD_SEED = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundedModel:
    """A model, computed in several copies."""

    spec: ModelSpec
    reader: CheckpointReader
    kinds: tuple[RoundingKind, ...]  # of each copy, ascending, as `Rounding` demands
    flip_shares: tuple[float, ...] = (
        FLIP_SHARES  # share of the plausible flips that each of the last copies makes
    )
    progress: Progress = field(default_factory=NoProgress)

    def run(
        self,
        batches: Sequence[Inputs],
        *,
        streams: Sequence[torch.Tensor] | None = None,
        first_layer: int = 0,
    ) -> list[torch.Tensor]:
        """Compute the last layer's output of each batch: [C,B,S,H], float32.

        With `streams`, all copies begin with the input of `first_layer` given there, [B,S,H] for each batch; behind the
        last layer that is its output.

        Raises:
            CheckpointError: A weight cannot be read.
        """
        inputs = self._embed(batches) if streams is None else streams
        states = [hidden.float().repeat(len(self.kinds), 1, 1) for hidden in inputs]  # [R,S,H]
        for layer in range(first_layer, self.spec.num_hidden_layers):
            num_bytes = self.reader.num_bytes_read
            tensors = LayerTensors.open(self.reader, self.spec, layer, torch.bfloat16)
            # Several batches read each weight again.
            weights: Mapping[str, torch.Tensor] = tensors if len(batches) == 1 else dict(tensors)
            rounded = RoundedLayer(self.spec, weights, kinds=self.kinds, seed=layer)
            flips = PlausibleFlips(
                num_copies=len(self.kinds),
                num_experts_per_tok=self.spec.num_experts_per_tok,
                seed=layer,
                shares=self.flip_shares,
            )
            states = [
                rounded.run_apart(hidden, batch, choose=flips.choose)
                for hidden, batch in zip(states, batches, strict=True)
            ]
            self.progress.advance(layer, num_bytes=self.reader.num_bytes_read - num_bytes)
        return [hidden.unflatten(0, (len(self.kinds), -1)) for hidden in states]

    def _embed(self, batches: Sequence[Inputs]) -> list[torch.Tensor]:
        embedding = ModelTensors.open(self.reader, self.spec, torch.bfloat16, with_layers=False)[EMBEDDING]
        return [embedding[batch.input_ids] for batch in batches]

    def head(self) -> RoundedHead:
        """Return the head of all copies, its weights in memory."""
        outer = ModelTensors.open(self.reader, self.spec, torch.bfloat16, with_layers=False)
        lm_head = outer[EMBEDDING if self.spec.tie_word_embeddings else LM_HEAD]
        exact = Float32Head(outer[FINAL_NORM], lm_head, eps=self.spec.rms_norm_eps)
        return RoundedHead(exact=exact, kinds=self.kinds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundedHead:
    """The final norm and lm_head, computed in several copies."""

    exact: Float32Head
    kinds: tuple[RoundingKind, ...]  # of each copy, ascending

    def score(self, states_cth: torch.Tensor, *, draw: int) -> torch.Tensor:
        """Compute logits [C,T,vocab], float32, of the last layer's output; another `draw`, other random steps."""
        rounding, rounded = Rounding(seed=_HEAD_SEED), rounded_rows(torch.tensor(self.kinds))
        with torch.no_grad():
            return self.exact.run_rounded(states_cth, rounding, rounded, draw=3 * draw)[ModelSite.LOGITS]
