"""Interval: how far a ρ is known, from what it is without one prompt after the other.

T judged tokens.
"""

from __future__ import annotations

import math

import torch

_TINY = 1e-300
# Student's t at 97.5 % by degrees of freedom, for those that differ from the normal 1.96 by more than 10 %.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
_NORMAL = 1.96
_FEWEST_PROMPTS = 3
_NUM_BLOCKS = 10


def rho_interval(
    error: torch.Tensor, floor: torch.Tensor, places: torch.Tensor
) -> tuple[float, float] | None:
    """The 95 % interval of ρ = sqrt(Σ error / Σ floor), by a jackknife on its logarithm.

    Prompts are left out one by one; where there are fewer than three, blocks of neighbouring tokens are.

    Args:
        error: Squared errors per token [T], float64.
        floor: Squared floor per token [T], float64.
        places: Row and position of each token, [T,2].

    Returns:
        The lower and the upper end; None where they cannot be told: two tokens or fewer, no error or no floor.
    """
    groups = _groups(places)
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    if num_groups < _FEWEST_PROMPTS:
        return None
    errors = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups, error.double())
    floors = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups, floor.double())
    without_error, without_floor = errors.sum() - errors, floors.sum() - floors
    if bool((without_error <= _TINY).any()) or bool((without_floor <= _TINY).any()):
        return None
    logarithms = 0.5 * (without_error / without_floor).log()
    if not bool(logarithms.isfinite().all()):
        return None
    deviation = math.sqrt(
        float((logarithms - logarithms.mean()).square().sum()) * (num_groups - 1) / num_groups
    )
    rho = math.sqrt(float(errors.sum() / floors.sum()))
    freedom = num_groups - 1
    reach = deviation * (_STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL)
    return rho * math.exp(-reach), rho * math.exp(reach)


def _groups(places: torch.Tensor) -> torch.Tensor:
    """The group that each token belongs to, int64 [T]."""
    groups: torch.Tensor = places[:, 0].unique(return_inverse=True)[1]
    if groups.numel() and int(groups.max()) + 1 >= _FEWEST_PROMPTS:
        return groups
    num_tokens = places.shape[0]
    return torch.arange(num_tokens) * min(_NUM_BLOCKS, num_tokens) // max(num_tokens, 1)
