"""Clues: what the port's values say by themselves, by which mistakes with too many parameter values find theirs.

B prompts, S tokens of each, T judged tokens, W wrong ones, E experts, k experts per token, F channels, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch

from compare.noise.yardstick import Yardstick, trimmed_mean
from minimax_tools.errors import number_ranges, word_ranges
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import EXPERT_GATE
from minimax_tools.reference.evaluation import Change, Evaluation, ExpertValue
from minimax_tools.reference.expert_pass import (
    Allocate,
    ExpertJob,
    LayerWeights,
    Recipe,
    read_matrix,
    run_experts,
)

# Mean square of what a fit leaves, in units of noise, up to which it explains the port.
_MOST_LEFT = 2.0
# Relative distance of a factor from a whole number up to which it is that number; and in units of its uncertainty.
_SAME_FACTOR, _SAME_BY_ERRORS = 0.01, 6.0
_FEWEST_OF_EXPERT = 4
# Tokens of each chosen number on which all experts run, to find whose weights it stands for; and share of the cost of
# the second best match that the best may have, to be sure.
_TOKENS_EACH, _SURE_COST = 3, 0.2
# The search of factors on the gate goes by the slope of the outputs over this step, so many times.
_STEP, _NUM_STEPS = 0.02, 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertFactors:
    """Factor on what each expert adds that fits the port best."""

    factors: torch.Tensor  # float64 [E]; NaN for an expert that no token chose
    errors: torch.Tensor  # their standard errors, float64 [E]
    leaves: float  # mean square of what they leave, in units of noise

    @property
    def explains(self) -> bool:
        """True if they leave noise alone."""
        return self.leaves <= _MOST_LEFT

    @property
    def seen(self) -> torch.Tensor:
        """Experts that some token chose, bool [E]."""
        return self.factors.isfinite()

    @property
    def differ(self) -> bool:
        """True if they leave noise alone, and are not all the same."""
        return self.explains and not self.are_alike

    @property
    def are_alike(self) -> bool:
        """True if all experts have one factor."""
        return bool(self.is_near(float(self.factors[self.seen].median()))[self.seen].all())

    @property
    def are_whole(self) -> torch.Tensor:
        """Factors that are whole numbers, bool [E]; an expert that no token chose counts as one."""
        return self.is_near(self.factors.nan_to_num(1.0).round()) | ~self.seen

    @property
    def largest(self) -> int:
        """The largest factor as a whole number."""
        return round(float(self.factors[self.seen].max()))

    @property
    def text(self) -> str:
        """The factors as text, 1 for experts that no token chose, and for those that may be right."""
        right = ((self.factors - 1.0).abs() <= _SAME_BY_ERRORS * self.errors) | ~self.seen
        return " ".join(
            "1" if is_right else f"{factor:.4g}"
            for factor, is_right in zip(self.factors.tolist(), right, strict=True)
        )

    def is_near(self, value: float | torch.Tensor) -> torch.Tensor:
        """Decide for each expert whether its factor is a value, bool [E]."""
        distance, size = (self.factors - value).abs(), torch.as_tensor(value).abs().clamp(min=1.0)
        return (distance <= _SAME_FACTOR * size) | (distance <= _SAME_BY_ERRORS * self.errors)

    def are_among(self, first: int, second: int) -> bool:
        """Decide whether every factor is one of two different values for sure, and both are there."""
        is_first, is_second = self.is_near(first), self.is_near(second)
        is_told = (is_first != is_second) | ~self.seen
        return bool(is_told.all() and is_first.any() and is_second.any())

    def experts_of(self, value: int) -> tuple[int, ...]:
        """Return the experts with a factor."""
        return tuple(self.is_near(value).nonzero().flatten().tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertClues:
    """The port's sum over experts at the settled tokens, and what the right experts add to it."""

    base: Evaluation  # the right layer on these tokens alone
    port: torch.Tensor  # the port's sum of the routed experts, float32 [T,H]
    deviation: torch.Tensor  # standard deviation of its noise, float32 [T,H]

    @classmethod
    def of(
        cls, base: Evaluation, yardstick: Yardstick, settled: torch.Tensor, *, scale: float
    ) -> ExpertClues | None:
        """Read the port's sum over experts from a site that holds `scale` times it; None if too few are settled."""
        indices = settled.nonzero().flatten()
        if len(indices) < _FEWEST_OF_EXPERT:
            return None
        some = base.select_tokens(indices)
        return cls(
            base=some,
            port=(yardstick.port[indices] - yardstick.exact[indices]) / scale
            + base[ExpertValue.ROUTED_SUM][indices],
            deviation=yardstick.variance[indices].sqrt() / scale,
        )

    @cached_property
    def factors(self) -> ExpertFactors:
        """Fit a factor on what each expert adds."""
        outputs = self.base[ExpertValue.EXPERT_OUTPUTS]
        return self._fit(self.port, outputs)[0]

    def gate_factors(self) -> ExpertFactors:
        """Fit a factor on each expert's gate projection, w1, step by step."""
        scale = torch.ones(self.base.spec.num_local_experts)
        for _ in range(_NUM_STEPS):
            outputs, ahead = (
                self.base.changed(Change(recipe=scaled_gate(scale * factor)))[ExpertValue.EXPERT_OUTPUTS]
                for factor in (1.0, 1.0 + _STEP)
            )
            (step,) = self._fit(self.port - self._weighed(outputs).sum(1), (ahead - outputs) / _STEP)
            scale = scale * (1.0 + step.factors.float().nan_to_num().clamp(-0.5, 1.0))
        found = torch.where(step.seen, scale.double(), torch.nan)
        return ExpertFactors(factors=found, errors=step.errors * scale, leaves=step.leaves)

    def experts_with(self, change: Change) -> tuple[int, ...]:
        """Return the experts that a change explains while the others are right; () unless both are so for sure."""
        changed = self.base.changed(change)[ExpertValue.EXPERT_OUTPUTS]
        right, wrong = self._fit(self.port, self.base[ExpertValue.EXPERT_OUTPUTS], changed)
        is_right, is_wrong = right.is_near(1.0) & wrong.is_near(0.0), right.is_near(0.0) & wrong.is_near(1.0)
        is_told = (is_right != is_wrong) | ~right.seen
        if not right.explains or not bool(is_told.all() and is_right.any()):
            return ()
        return tuple(is_wrong.nonzero().flatten().tolist())

    @cached_property
    def renumbering(self) -> Mapping[int, int]:
        """Return whose weights each number computes with, as far as that is sure; {} if none computes with another's.

        All experts run on some tokens, and each number is matched by its routing weights.
        """
        num_experts = self.base.spec.num_local_experts
        if num_experts > self.port.shape[1]:
            return {}
        some = _few_of_each(self.base[Site.ROUTER_EXPERTS])
        layer = self.base.select_tokens(some)
        every = torch.arange(num_experts).expand(len(some), -1)
        job = ExpertJob(
            graph=layer.spec.graph,
            states=layer[ExpertValue.EXPERT_INPUT],
            experts=every,
            shares=torch.ones(every.shape),
        )
        (outputs,) = run_experts(layer.weights, [job])
        rows = outputs / self.deviation[some][:, None]
        target = self.port[some] / self.deviation[some]
        # Share of each expert's weights in the port's sum at each token, [T,E].
        shares = torch.linalg.lstsq(rows.transpose(1, 2).double(), target.double()[..., None]).solution[
            ..., 0
        ]
        left = target - (rows * shares[..., None]).sum(1).float()
        # E factors per token leave less than noise.
        if trimmed_mean(left.square().double().mean(-1)) > _MOST_LEFT:
            return {}
        return _match_numbers(shares.float(), layer[Site.ROUTER_EXPERTS], layer[Site.ROUTER_WEIGHTS])

    def _weighed(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs * self.base[Site.ROUTER_WEIGHTS][..., None]

    def _fit(self, target: torch.Tensor, *variants: torch.Tensor) -> tuple[ExpertFactors, ...]:
        """Fit a factor on each expert's outputs in V variants, [T,k,H] each, which add up to a target [T,H]."""
        num_experts = self.base.spec.num_local_experts
        numbers = self.base[Site.ROUTER_EXPERTS]
        rows = torch.cat([self._weighed(outputs) for outputs in variants], 1) / self.deviation[:, None]
        unknowns = torch.cat([numbers + variant * num_experts for variant in range(len(variants))], 1)
        target = target / self.deviation
        found, errors = _solve(rows, unknowns, target, num_unknowns=len(variants) * num_experts)
        left = target - (rows * found.float().nan_to_num()[unknowns][..., None]).sum(1)
        leaves = trimmed_mean(left.square().double().mean(-1))
        return tuple(
            ExpertFactors(factors=factors, errors=spread, leaves=leaves)
            for factors, spread in zip(found.split(num_experts), errors.split(num_experts), strict=True)
        )


def _solve(
    rows: torch.Tensor, unknowns: torch.Tensor, target: torch.Tensor, *, num_unknowns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve least squares: rows [T,n,H], each with its unknown [T,n], add up to a target [T,H].

    Returns the unknowns, float64 [U], and their standard errors; NaN where no row has the unknown.
    """
    products = (rows @ rows.transpose(1, 2)).double()
    normal = torch.zeros(num_unknowns, num_unknowns, dtype=torch.float64)
    normal.index_put_((unknowns[:, :, None], unknowns[:, None, :]), products, accumulate=True)
    right = torch.zeros(num_unknowns, dtype=torch.float64)
    right.index_put_((unknowns,), (rows @ target[..., None])[..., 0].double(), accumulate=True)
    seen = normal.diagonal() > 0.0
    inverse = torch.linalg.pinv(normal[seen][:, seen], hermitian=True)
    found, errors = torch.full((2, num_unknowns), torch.nan, dtype=torch.float64)
    found[seen], errors[seen] = inverse @ right[seen], inverse.diagonal().clamp(min=0.0).sqrt()
    return found, errors


def _few_of_each(numbers: torch.Tensor) -> torch.Tensor:
    """Return tokens of [T,k] that hold each chosen number a few times, as far as so many do: ascending indices."""
    chosen = [(numbers == number).any(1).nonzero().flatten()[:_TOKENS_EACH] for number in numbers.unique()]
    tokens: torch.Tensor = torch.cat(chosen).unique()
    return tokens


def _match_numbers(shares: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> dict[int, int]:
    """Match chosen numbers [T,k] with the experts whose share [T,E] is their weight [T,k], where that is sure."""
    num_experts = shares.shape[1]
    costs = torch.zeros(num_experts, num_experts)
    for slot in range(numbers.shape[1]):
        costs.index_add_(0, numbers[:, slot], (shares - weights[:, slot, None]).square())
    (best, second), (place, _) = (part.T for part in costs.topk(2, dim=1, largest=False))
    is_seen = torch.bincount(numbers.flatten(), minlength=num_experts) > 0
    is_sure = is_seen & (best <= _SURE_COST * second)
    found = {number: int(place[number]) for number in is_sure.nonzero().flatten().tolist()}
    return found if any(number != place for number, place in found.items()) else {}


def scaled_gate(factors: torch.Tensor) -> Recipe:
    """Multiply the gate projection of each expert by its factor [E]."""

    def read(weights: LayerWeights, expert: int, matrix: str, allocate: Allocate) -> torch.Tensor:
        return read_matrix(weights, expert, matrix, allocate) * factors[expert]

    return Recipe(read=read, changed=(EXPERT_GATE,))


def word_experts(experts: Sequence[int]) -> str:
    """Word numbers of experts, as `0-2 16`."""
    return " ".join(word_ranges(number_ranges(sorted(experts))))


def parse_experts(text: str) -> tuple[int, ...]:
    """Parse what `word_experts` wrote."""
    spans = [part.split("-") for part in text.split()]
    return tuple(number for span in spans for number in range(int(span[0]), int(span[-1]) + 1))


# ρ of a token from which it counts as wrong: right tokens whose experts stay the same are below 2.
_WRONG_RHO = 3.0
# Of an exchanged pair, most tokens that chose either expert are wrong, if it weighs enough, and nearly no others.
_LEAST_SHARE, _LEAST_COVERED = 0.75, 0.9
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
        pairs = [pair for pair, num in covered.items() if num >= _LEAST_COVERED * num_wrong]
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
            experts=self._chosen[self.settled],
            positions=self.base.position_ids.flatten()[self.base.tokens][self.settled],
            num_experts=self.base.spec.num_local_experts,
        )

    @property
    def _chosen(self) -> torch.Tensor:
        """Experts that the right layer chooses, int64 [T,k]; [T,0] of a dense layer."""
        if self.base.graph.is_dense:
            return torch.zeros(len(self.base.tokens), 0, dtype=torch.int64)
        return self.base[Site.ROUTER_EXPERTS]

    @cached_property
    def experts(self) -> ExpertClues | None:
        """Reading of what each expert added; None of a dense layer, if no site behind shows it, or few are settled."""
        if self.base.graph.is_dense:
            return None
        site, scale = self._shows(Site.ROUTED_DELTA), 1.0
        if site is None:
            site, scale = self._shows(Site.MOE_DELTA), self.base.graph.model.sum_scale
        if site is None:
            return None
        return ExpertClues.of(self.base, self.yardsticks[site], self.settled, scale=scale)

    def moved_tokens(self, site: Site) -> Mapping[int, int]:
        """Return the tokens that hold another token's right values of a site, as indices among all B·S, and whose."""
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
        is_added = site is self.base.graph.last_delta and Site.OUTPUT in self.yardsticks
        return Site.OUTPUT if is_added else None


def _squared_distances(values: torch.Tensor, others: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """Return the mean over the channels of (values - others)² / variance [F]: [W,N], of values [W,F], others [N,F]."""
    first, second = (rows / variance.sqrt() for rows in (values, others))
    return torch.cdist(first, second).square() / values.shape[1]
