"""Kept tokens: the values of each row's last tokens alone, for long rows.

A row of thousands of tokens shows what short rows cannot: windows, pages and chunks of attention. Its last tokens show
it as well as all of them, and take little disk. What other tokens or layers read is stored of every token.
B rows, S columns, n last tokens of each row, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minimax_tools.errors import IncomparableError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site

# Sites that are stored of every token: a layer's input and output, and the keys and values that later tokens read.
_WHOLE_SITES = frozenset((Site.INPUT, Site.OUTPUT, Site.K_ROPE, Site.V_PROJ))
# Sites of which other tokens read every token, and that are not stored so.
MIXED_SITES = frozenset((Site.INPUT_NORM, Site.K_PROJ, Site.K_NORM))

# Tensors by site: of a layer, or of those outside the layers.
_BySite = Mapping[Site, torch.Tensor] | Mapping[ModelSite, torch.Tensor]


class KeptTokens:
    """The last tokens of each row of `inputs`: cut out of tensors, and put back."""

    def __init__(self, inputs: Inputs) -> None:
        is_kept = inputs.is_kept
        self._shape = inputs.batch_shape
        self._count = inputs.last_tokens
        self._rows = torch.arange(inputs.batch_size)[:, None]
        self._columns = is_kept.nonzero()[:, 1].unflatten(0, (inputs.batch_size, self._count))  # [B,n]

    def cut_sites(self, tensors: _BySite) -> dict[Any, torch.Tensor]:
        """Return what is stored of each site: its last tokens, or every token."""
        twins = self.cut_twins(tensors)
        return {site: tensor if site in _WHOLE_SITES else twins[site] for site, tensor in tensors.items()}

    def cut_twins(self, twins: _BySite) -> dict[Any, torch.Tensor]:
        """Return the last tokens of float32 twins by site."""
        return {site: self._cut(twin, has_heads_dim=site.has_heads_dim) for site, twin in twins.items()}

    def cut_floor(self, statistics: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the last tokens of a noise floor's statistics by name; averages over tokens stay."""
        return {name: self._cut(statistic) for name, statistic in statistics.items()}

    def put_back(self, tensor: torch.Tensor, *, has_heads_dim: bool = False) -> torch.Tensor:
        """Return last tokens, [B,n,…] or [B,heads,n,D], at their places among all; zeros elsewhere.

        Any other tensor stays as it is.
        """
        by_token = _tokens_first(tensor, has_heads_dim=has_heads_dim)
        if by_token is None or by_token.shape[:2] != (self._shape[0], self._count):
            return tensor
        # Zeros take no memory until they are written to.
        whole = by_token.new_zeros((*self._shape, *by_token.shape[2:]))
        whole[self._rows, self._columns] = by_token
        return whole.transpose(1, 2) if has_heads_dim else whole

    def whole_shape(self, shape: tuple[int, ...], *, has_heads_dim: bool) -> tuple[int, ...]:
        """Return the shape of a stored tensor once it is put back."""
        dim = 2 if has_heads_dim else 1
        return (*shape[:dim], self._shape[1], *shape[dim + 1 :])

    def _cut(self, tensor: torch.Tensor, *, has_heads_dim: bool = False) -> torch.Tensor:
        """Return the last tokens of [B,S,…] or [B,heads,S,D]; a tensor of another shape is left for the judge."""
        by_token = _tokens_first(tensor, has_heads_dim=has_heads_dim)
        if by_token is None or by_token.shape[:2] != self._shape:
            return tensor
        kept = by_token[self._rows, self._columns]
        return kept.transpose(1, 2) if has_heads_dim else kept


def refuse_last_tokens(count: int, *, directory: Path | str) -> None:
    """Refuse a capture that keeps the last `count` tokens of each row, unless that is 0 for all.

    Raises:
        IncomparableError: It does.
    """
    if count:
        raise IncomparableError(
            f"{directory} keeps the last {count} tokens of each row alone",
            expected="a golden of every token, for whole ports, prompts and exports",
            next_step="Make one without --last-tokens; on this one run layers alone, as mm2-test sweep does.",
        )


def _tokens_first(tensor: torch.Tensor, *, has_heads_dim: bool) -> torch.Tensor | None:
    """Return a tensor as [B,tokens,…]; None if it has too few dims."""
    if tensor.ndim < 2 + has_heads_dim:
        return None
    return tensor.transpose(1, 2) if has_heads_dim else tensor
