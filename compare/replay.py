"""Replay: what the golden would have computed with the port's own experts, so that tokens past a flip are judged.

What another choice changes is computed in float32 and added to the golden and to its twin alike: the golden keeps
its own rounding error, and the floor its size.
T real tokens, t those that are replayed, H hidden, E experts, k experts per token, F channels of a site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from compare.noise import Rows
from compare.routing import expert_shares, flipped_tokens
from compare.sides import Sides
from compare.weights import WeightSource
from minimax_tools.checkpoint.names import CORRECTION_BIAS
from minimax_tools.reference.upcast import upcast_experts
from minimax_tools.sites import Site

# Of these the other experts' products must be computed; of the router's weights its logits tell all.
_BEHIND_EXPERTS = (Site.MOE_DELTA, Site.OUTPUT)


class Replay:
    """The golden with the port's experts, in one layer.

    Args:
        sides: The captures, and the weights where they are known.
        layer: The layer.
        experts: The golden's and the port's experts, [T,k] each.
    """

    def __init__(self, sides: Sides, *, layer: int, experts: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._sides = sides
        self._layer = layer
        self._mine, self._theirs = (side.long() for side in experts)
        self.flipped = flipped_tokens(*experts)
        self._logits = self._read(Site.ROUTER_LOGITS)
        self._tokens = self.flipped & self._are_experts()
        self._opened: _Opened | None = None

    @property
    def scores(self) -> torch.Tensor | None:
        """The golden's biased scores, float32 [T,E]; None where no token flipped, or the weights are not known.

        Raises:
            IncomparableError: The weights are another model's.
            CheckpointError: They cannot be read.
        """
        if self._logits is None or self._sides.weights is None or not bool(self.flipped.any()):
            return None
        return self._logits.sigmoid() + self._open(self._sides.weights).bias

    def tokens(self, site: Site) -> torch.Tensor:
        """Tokens past a flip that can be replayed at a site behind the router: bool [T]."""
        needs_weights = site in _BEHIND_EXPERTS
        if needs_weights and (self._sides.weights is None or self._read(Site.POST_NORM) is None):
            return torch.zeros_like(self._tokens)
        return self._tokens

    def rows(self, site: Site, rows: Rows) -> Rows:
        """Rows of a site whose golden holds, past a flip, what the port's own experts give.

        Args:
            site: The router's weights, ordered by the experts that they belong to, or a site behind the experts.
            rows: As both sides stored them.

        Raises:
            IncomparableError: The weights are another model's.
            CheckpointError: They cannot be read.
        """
        tokens = self.tokens(site)
        if not bool(tokens.any()):
            return rows
        stored_dtype = rows.dtype
        if site is Site.ROUTER_WEIGHTS:
            return replace(
                rows,
                reference=_put(
                    rows.reference, tokens, self._shares(self._read_reference(Site.ROUTER_LOGITS), tokens)
                ),
                twin=None
                if rows.twin is None
                else _put(rows.twin, tokens, self._shares(self._logits, tokens)),
                replayed=tokens,
                stored_dtype=stored_dtype,
            )
        assert self._sides.weights is not None, "tokens are replayed where the weights are known"
        shift = self._open(self._sides.weights).shift
        assert shift is not None, "tokens are replayed where the experts' input is known"
        return replace(
            rows,
            reference=_add(rows.reference, tokens, shift),
            twin=None if rows.twin is None else _add(rows.twin, tokens, shift),
            replayed=tokens,
            stored_dtype=stored_dtype,
        )

    def _are_experts(self) -> torch.Tensor:
        """Tokens whose experts the port names by numbers that there are: bool [T]."""
        if self._logits is None:
            return torch.zeros_like(self.flipped)
        return ((self._theirs >= 0) & (self._theirs < self._logits.shape[-1])).all(dim=-1)

    def _read(self, site: Site) -> torch.Tensor | None:
        """The best that is known of what the golden computed with, [T,F] float32: its twin, else the golden."""
        twin = self._sides.reference.read_twin(self._layer, site)
        if twin is not None:
            return self._sides.batch.rows(twin, site).float()
        return self._read_reference(site)

    def _read_reference(self, site: Site) -> torch.Tensor | None:
        reference = self._sides.reference
        if site not in reference.sites(self._layer):
            return None
        return self._sides.batch.rows(reference.read(self._layer, site), site).float()

    def _shares(self, logits: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """What the port's experts count by the golden's logits, [t,k], in ascending order of the experts."""
        assert logits is not None, "tokens are replayed where the logits are known"
        return expert_shares(logits[tokens].sigmoid(), self._theirs[tokens].sort(dim=-1).values)

    def _open(self, source: WeightSource) -> _Opened:
        """What the layer's weights tell; they are read once."""
        if self._opened is None:
            with source.open_layer(self._layer, self._sides.reference) as weights:
                self._opened = _Opened(
                    bias=weights.tensors[CORRECTION_BIAS].float(),
                    shift=self._compute_shift(weights.tensors),
                )
        return self._opened

    def _compute_shift(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        tokens, states, logits = self._tokens, self._read(Site.POST_NORM), self._logits
        if states is None or logits is None:
            return None
        mine, theirs = self._mine[tokens], self._theirs[tokens]
        scores = logits[tokens].sigmoid()
        shares = expert_shares(scores, theirs), -expert_shares(scores, mine)
        # The port's choice less the golden's, in one go: each expert is read and upcast once.
        return upcast_experts(
            weights, states[tokens], torch.cat((theirs, mine), dim=-1), torch.cat(shares, dim=-1)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Opened:
    """What the layer's weights tell.

    Args:
        bias: The correction bias, float32 [E].
        shift: What the port's experts change in what they add, float32 [t,H]; None where the golden did not keep
            what they were fed.
    """

    bias: torch.Tensor
    shift: torch.Tensor | None


def _put(rows: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    changed = rows.clone()
    changed[tokens] = values.to(rows.dtype)
    return changed


def _add(rows: torch.Tensor, tokens: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Float32 rows: a sum rounded to BF16 would add an error that the golden has not."""
    changed = rows.float()
    if changed is rows:
        changed = rows.clone()
    changed[tokens] += shift
    return changed
