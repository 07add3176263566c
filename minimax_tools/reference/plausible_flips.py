"""PlausibleFlips: the experts that copies of a model choose, some of them with the flips that noise may cause.

A few samples of noise rarely show a token's flips: most happen to none of them. So the last copies make those that are
plausible: where the score of the next expert is within the reach of noise, it takes the place of the last one chosen.
Each of these copies makes a share of them, drawn at random.
R rows of all copies (copies · B), C copies, S sequence, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Share of the plausible flips that each of the last copies makes.
FLIP_SHARES = (0.5, 1.0)
# Difference of two scores that noise may turn round, in units of the usual error of a score.
_REACH = 6.0
# The same in units of the largest error among the token's own scores.
_OWN_REACH = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlausibleFlips:
    """A choice of experts for the copies of one layer, of which the first is exact."""

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
