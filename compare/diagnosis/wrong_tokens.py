"""Wrong tokens of the port, by which mistakes with too many parameter values find theirs.

T judged tokens, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch

# Of an exchanged pair, nearly all tokens that chose either expert are wrong, and nearly no others.
_LEAST_SHARE = 0.9
# An expert that fewer tokens chose tells nothing.
_FEWEST_TOKENS = 2
# Pairs and positions that are worth a trial.
_MOST_PAIRS, _MOST_POSITIONS = 6, 8
# Position of the first wrong token, at least: many mistakes of attention leave the first token right, which sees
# nothing but itself.
_FIRST_POSITION = 3
# Tokens just before the first clearly wrong one may be wrong too, below the limit of a single token.
_POSITIONS_BEFORE = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrongTokens:
    """Wrong tokens among those whose experts no noise changes, with their experts and positions."""

    is_wrong: torch.Tensor  # whether the port's values are wrong, bool [T]
    experts: torch.Tensor  # experts that the right layer chooses, int64 [T,k]
    positions: torch.Tensor  # position of each token, int64 [T]
    num_experts: int

    def exchanged_experts(self) -> tuple[tuple[int, int], ...]:
        """Return pairs of experts whose tokens are wrong while others are right; the best pair comes first."""
        num_wrong = int(self.is_wrong.sum())
        if num_wrong == len(self.is_wrong):
            return ()
        takes = torch.zeros(len(self.experts), self.num_experts, dtype=torch.bool)
        takes.scatter_(1, self.experts, True)
        num_takers, num_hits = takes.sum(0), takes[self.is_wrong].sum(0)
        is_suspect = (num_takers >= _FEWEST_TOKENS) & (num_hits >= _LEAST_SHARE * num_takers)
        # The wrong tokens that each pair accounts for.
        covered = {
            (first, second): int((takes[self.is_wrong, first] | takes[self.is_wrong, second]).sum())
            for first, second in combinations(is_suspect.nonzero().flatten().tolist(), 2)
        }
        pairs = [pair for pair, num in covered.items() if num >= _LEAST_SHARE * num_wrong]
        return tuple(sorted(pairs, key=lambda pair: covered[pair], reverse=True)[:_MOST_PAIRS])

    def first_wrong_positions(self) -> tuple[int, ...]:
        """Return the positions from which on tokens may be wrong, the likeliest first; () if none is right before."""
        wrong = self.positions[self.is_wrong]
        if not len(wrong):
            return ()
        first = int(wrong.min())
        right_before = self.positions[~self.is_wrong & (self.positions < first)]
        if first < _FIRST_POSITION or not len(right_before):
            return ()
        lowest = max(int(right_before.max()) + 1 - _POSITIONS_BEFORE, 1)
        return tuple(range(first, lowest - 1, -1))[:_MOST_POSITIONS]
