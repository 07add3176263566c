"""The 95 % interval of ρ, by the jackknife: ρ again and again, each time without one group of tokens.

The more these values of ρ scatter, the wider is the interval. A group is a prompt, since only the errors of different
prompts are independent. T judged tokens.
"""

from __future__ import annotations

import math

import torch
from scipy.special import stdtrit

# The interval leaves out 2.5 % at either end.
_UPPER_QUANTILE = 0.975
# With fewer groups, there is no interval.
_FEWEST_GROUPS = 3
# If there are fewer prompts, this many blocks of neighbouring tokens are the groups.
_NUM_BLOCKS = 10


def rho_interval(
    error: torch.Tensor, floor: torch.Tensor, places: torch.Tensor
) -> tuple[float, float] | None:
    """Compute the interval of ρ = sqrt(Σ error / Σ floor), on the logarithm of ρ.

    `error` and `floor` are squares per token, [T]; `places` [T,2] are the tokens' rows (prompts) and positions. None
    with two tokens or fewer, and if a sum without one group is 0 or not finite.
    """
    groups = _groups(places)
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    if num_groups < _FEWEST_GROUPS:
        return None
    errors = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups, error.double())
    floors = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups, floor.double())
    without_error, without_floor = errors.sum() - errors, floors.sum() - floors
    # ρ is a square root, so its logarithm is half that of the ratio of squares. It is not finite if a sum is 0.
    logarithms = 0.5 * (without_error / without_floor).log()
    if not bool(logarithms.isfinite().all()):
        return None
    # The jackknife's standard error, from the spread of the values without one group each.
    deviation = math.sqrt(
        float((logarithms - logarithms.mean()).square().sum()) * (num_groups - 1) / num_groups
    )
    rho = math.sqrt(float(errors.sum() / floors.sum()))
    reach = deviation * float(stdtrit(num_groups - 1, _UPPER_QUANTILE))
    return rho * math.exp(-reach), rho * math.exp(reach)


def _groups(places: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's group, int64 [T]: its prompt, or its block if there are few prompts."""
    groups: torch.Tensor = places[:, 0].unique(return_inverse=True)[1]
    if groups.numel() and int(groups.max()) + 1 >= _FEWEST_GROUPS:
        return groups
    # At most _NUM_BLOCKS blocks, of equal length to within one token.
    num_tokens = places.shape[0]
    return torch.arange(num_tokens) * min(_NUM_BLOCKS, num_tokens) // max(num_tokens, 1)
