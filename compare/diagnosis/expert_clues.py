"""ExpertClues: what each chosen number of an expert added to the port's values, by least squares over the tokens.

T tokens, k experts per token, E experts, H hidden, V variants of the experts' outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from compare.diagnosis.evaluation import Change, Evaluation, ExpertValue
from compare.diagnosis.expert_pass import ExpertJob, Recipe, read_matrix, run_experts
from compare.diagnosis.layer_weights import Allocate, LayerWeights
from compare.diagnosis.yardstick import Yardstick, trimmed_mean
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import EXPERT_GATE
from minimax_tools.number_ranges import number_ranges, word_ranges

# Mean square of what a fit leaves, in units of noise, up to which it explains the port.
_MOST_LEFT = 2.0
# Relative distance of a factor from a whole number up to which it is that number; and in units of its uncertainty.
_SAME_FACTOR, _SAME_BY_ERRORS = 0.01, 6.0
_FEWEST_TOKENS = 4
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
    port: torch.Tensor  # the port's moe_delta, float32 [T,H]
    deviation: torch.Tensor  # standard deviation of its noise, float32 [T,H]

    @classmethod
    def of(cls, base: Evaluation, yardstick: Yardstick, settled: torch.Tensor) -> ExpertClues | None:
        """Read the port's sum over experts from a site behind them; None if too few tokens are settled."""
        indices = settled.nonzero().flatten()
        if len(indices) < _FEWEST_TOKENS:
            return None
        some = base.select_tokens(indices)
        return cls(
            base=some,
            port=yardstick.port[indices] - yardstick.exact[indices] + base[Site.MOE_DELTA][indices],
            deviation=yardstick.variance[indices].sqrt(),
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
        job = ExpertJob(states=layer[ExpertValue.EXPERT_INPUT], experts=every, shares=torch.ones(every.shape))
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
