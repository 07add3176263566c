"""Clues: what the port's values say by themselves, by which mistakes with too many parameter values find theirs.

B prompts, S tokens of each, T judged tokens, W wrong ones, E experts, k experts per token, F channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch

from compare.diagnosis.evaluation import Evaluation
from compare.diagnosis.expert_clues import ExpertClues
from compare.diagnosis.yardstick import Yardstick
from minimax_tools.model.sites import Site

# ρ of a token from which it counts as wrong: right tokens whose experts stay the same are below 2.
_WRONG_RHO = 3.0
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
# Mean square of the distance to another token's right values, in units of noise, up to which they are the same values.
_SAME_VALUES = 4.0
# Share of the wrong tokens that hold another token's values, at least, if that is what is wrong.
_LEAST_MOVED = 0.9
# Distance from the nearest token, in units of that from the next, of one that surely holds the nearest's values.
_FAR_NEARER = 0.02


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Clues:
    """Reading of a port's values, on the tokens whose experts no noise changes."""

    base: Evaluation  # the right layer, on all judged tokens
    yardsticks: Mapping[Site, Yardstick]
    settled: torch.Tensor  # tokens that count, bool [T]

    @cached_property
    def wrong_tokens(self) -> WrongTokens:
        """The wrong tokens, at the judging site where a token is worst."""
        misfits = [
            yardstick.misfit(yardstick.exact, yardstick.variance) for yardstick in self.yardsticks.values()
        ]
        worst = torch.stack(misfits).nan_to_num(nan=torch.inf).amax(0)
        return WrongTokens(
            is_wrong=worst[self.settled] > _WRONG_RHO**2,
            experts=self.base[Site.ROUTER_EXPERTS][self.settled],
            positions=self.base.position_ids.flatten()[self.base.tokens][self.settled],
            num_experts=self.base.spec.num_local_experts,
        )

    @cached_property
    def experts(self) -> ExpertClues | None:
        """Reading of what each expert added; None if no site behind them is judged, or too few tokens are settled."""
        site = self._shows(Site.MOE_DELTA)
        return None if site is None else ExpertClues.of(self.base, self.yardsticks[site], self.settled)

    def moved_tokens(self, site: Site) -> Mapping[int, int]:
        """Return the tokens that hold another token's right values of a site, as indices among all B·S, and whose.

        Nothing is returned unless nearly all wrong tokens do.
        """
        shown = self._shows(site)
        is_wrong = self.wrong_tokens.is_wrong
        if shown is None or not bool(is_wrong.any()) or self.base.attention_mask.numel() < 2:
            return {}
        yardstick = self.yardsticks[shown]
        wrong = self.settled.nonzero().flatten()[is_wrong]
        values = yardstick.port[wrong] - yardstick.exact[wrong] + self.base.rows(site)[wrong]
        squares = _squared_distances(
            values, self.base.everywhere().rows(site), yardstick.variance[wrong].mean(0)
        )
        (distance, second), (source, _) = (part.T for part in squares.topk(2, dim=1, largest=False))
        is_other = source != self.base.tokens[wrong]
        if float(((distance <= _SAME_VALUES) & is_other).float().mean()) < _LEAST_MOVED:
            return {}
        # Of the rest, those that are far nearer to one token than to the next: noise changed an expert of it.
        is_moved = (distance <= torch.clamp(_FAR_NEARER * second, min=_SAME_VALUES)) & is_other
        places = self.base.tokens[wrong][is_moved].tolist()
        return dict(zip(places, source[is_moved].tolist(), strict=True))

    def repeats(self, site: Site, others: torch.Tensor) -> bool:
        """Decide whether the port gives the same values at a site to each token and another, [B·S]; -1 for none."""
        shown = self._shows(site)
        if shown is None:
            return False
        yardstick, right = self.yardsticks[shown], self.base.rows(site)
        # Places of the settled tokens among the T, by their indices among all B·S.
        place = torch.full((self.base.attention_mask.numel(),), -1)
        place[self.base.tokens[self.settled]] = self.settled.nonzero().flatten()
        other = torch.where(others >= 0, place[others], -1)
        is_pair = (place >= 0) & (other >= 0) & (place != other)
        if int(is_pair.sum()) < _FEWEST_TOKENS:
            return False
        first, second = place[is_pair], other[is_pair]
        variance = yardstick.variance[first] + yardstick.variance[second]

        def apart(values: torch.Tensor) -> float:
            return float(((values[first] - values[second]).square() / variance).mean(1).median())

        return apart(yardstick.port - yardstick.exact + right) <= _SAME_VALUES < apart(right)

    def _shows(self, site: Site) -> Site | None:
        """Return the judged site that shows a site's values: itself, or the output, if it is added there."""
        if site in self.yardsticks:
            return site
        is_added = site is Site.MOE_DELTA and Site.OUTPUT in self.yardsticks
        return Site.OUTPUT if is_added else None


def _squared_distances(values: torch.Tensor, others: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """Return the mean over the channels of (values - others)² / variance [F]: [W,N], of values [W,F], others [N,F]."""
    first, second = (rows / variance.sqrt() for rows in (values, others))
    return torch.cdist(first, second).square() / values.shape[1]
