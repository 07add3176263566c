"""RoundedModel: copies of the whole model computed side by side, each with its own kind of rounding.

The copies are those of `RoundedLayer`, chained from the embedding to the logits; each chooses its own experts, the last
ones with plausible flips. The others' distance from the exact copy is the noise that a right port gathers on its way
through all layers. One layer's weights are in memory at a time.
B batch, S sequence, R rows of all copies (copies · B), C copies, H hidden, E experts, k experts per token, T tokens.
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
from minimax_tools.reference.rounded_layer import RoundedLayer
from minimax_tools.reference.rounding import Float32Head, Rounding, RoundingKind, rounded_rows

# Seed of the head's random steps; a layer's is its number.
_HEAD_SEED = 1 << 20
# Share of the plausible flips that each of the last copies makes.
FLIP_SHARES = (0.5, 1.0)
# Difference of two scores that noise may turn round, in units of the usual error of a score.
_REACH = 6.0
# The same in units of the largest error among the token's own scores.
_OWN_REACH = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlausibleFlips:
    """A choice of experts for the copies of one layer, of which the first is exact.

    A few samples of noise rarely show a token's flips: most happen to none of them. So the last copies make those that
    are plausible: where the score of the next expert is within the reach of noise, it takes the place of the last one
    chosen. Each of these copies makes a share of them, drawn at random.
    """

    num_copies: int
    num_experts_per_tok: int
    seed: int  # of the random shares
    shares: tuple[float, ...] = FLIP_SHARES  # of the last copies

    def choose(self, biased_rse: torch.Tensor) -> torch.Tensor:
        """Choose experts [R,S,k] by the biased scores of all copies, [R,S,E]."""
        k = self.num_experts_per_tok
        scores_cbse = biased_rse.unflatten(0, (self.num_copies, -1))
        if k == scores_cbse.shape[-1]:
            return biased_rse.topk(k, dim=-1).indices
        best = scores_cbse.topk(k + 1, dim=-1)
        experts = best.indices[..., :k].clone()
        is_plausible = best.values[..., k - 1] - best.values[..., k] <= self._reach(scores_cbse)
        # Rounding may have flipped a copy's experts already: another flip would undo that.
        own = experts.sort(dim=-1).values
        is_plausible &= (own == own[:1]).all(dim=-1)
        generator = torch.Generator().manual_seed(self.seed)
        for copy, share in enumerate(self.shares, start=self._num_rounding):
            flips = is_plausible[copy]
            if share < 1.0:
                flips = flips & (torch.rand(flips.shape, generator=generator) < share).to(flips.device)
            experts[copy, ..., k - 1] = torch.where(
                flips, best.indices[copy, ..., k], best.indices[copy, ..., k - 1]
            )
        chosen: torch.Tensor = experts.flatten(0, 1)
        return chosen

    @property
    def _num_rounding(self) -> int:
        """Number of copies that make no flips but their own."""
        return self.num_copies - len(self.shares)

    def _reach(self, scores_cbse: torch.Tensor) -> torch.Tensor:
        """Return the margin of each token that noise may turn round [B,S], by the copies that round and do not flip."""
        errors = (scores_cbse[1 : self._num_rounding] - scores_cbse[:1]).abs()
        # Some tokens have larger errors than most: after a flip, or in massive channels.
        return _REACH * errors.median() + _OWN_REACH * errors.amax(dim=(0, -1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundedModel:
    """A model, computed in several copies."""

    spec: ModelSpec
    reader: CheckpointReader
    kinds: tuple[RoundingKind, ...]  # of each copy, ascending, as `Rounding` demands
    flip_shares: tuple[float, ...] = FLIP_SHARES
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
        exact = Float32Head(outer[FINAL_NORM], lm_head, spec=self.spec)
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
