"""Replay: the golden computed with the port's own experts, so that tokens past a flip are judged.

Other experts are another computation, with a noise floor of its own. So past a flip all of it is computed anew from
the golden's input to its experts: exactly, as a golden rounds, and with a random variant of its roundings.
T real tokens, t those that are replayed, H hidden, E experts, k experts per token, F channels of a site.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from compare.judging.routing import flipped_tokens
from compare.noise.rows import Rows
from compare.noise.squared_errors import TINY, square_difference
from compare.sides.golden_weights import GoldenWeights, WeightSource
from compare.sides.layer_floor import LayerFloor
from compare.sides.sides import Sides
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS
from minimax_tools.reference.float32_stages import expert_shares
from minimax_tools.reference.rounding import Rounding, RoundingKind
from minimax_tools.reference.upcast import ExpertRounding, upcast_experts

# Of these the other experts' products must be computed; of the router's weights its logits tell all.
_BEHIND_EXPERTS = (Site.MOE_DELTA, Site.OUTPUT)


class Replay:
    """The golden with the port's experts, in one layer.

    Args:
        sides: The captures, and the weights where they are known.
        experts: The golden's and the port's experts, [T,k] each.
    """

    def __init__(self, sides: Sides, *, layer: int, experts: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._sides = sides
        self._layer = layer
        self._port_experts = experts[1].long()
        self.flipped = flipped_tokens(*experts)
        self._logits = self._read(Site.ROUTER_LOGITS)
        self._tokens = self.flipped & self._are_experts()
        self._opened: _Opened | None = None

    @property
    def scores(self) -> torch.Tensor | None:
        """Biased scores of the golden, float32 [T,E]; None where no token flipped, or the weights are not known.

        Raises:
            IncomparableError: The weights are another model's.
            CheckpointError: They cannot be read.
        """
        if self._logits is None or self._sides.weights is None or not bool(self.flipped.any()):
            return None
        return self._logits.sigmoid() + self._open(self._sides.weights).bias

    def tokens(self, site: Site) -> torch.Tensor:
        """Find tokens past a flip that can be replayed at a site behind the router: bool [T]."""
        needs_weights = site in _BEHIND_EXPERTS
        if needs_weights and (self._sides.weights is None or self._read(Site.POST_NORM) is None):
            return torch.zeros_like(self._tokens)
        return self._tokens

    def rows(self, site: Site, rows: Rows) -> Rows:
        """Replace the golden's rows past a flip by what the port's own experts give.

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
        if site is Site.ROUTER_WEIGHTS:
            return self._replay_weights(rows, tokens)
        assert self._sides.weights is not None, "tokens are replayed where the weights are known"
        experts = self._open(self._sides.weights).experts
        assert experts is not None, "tokens are replayed where the experts' input is known"
        exact, *rounded = self._behind(site, experts, tokens, rows)
        errors = [square_difference(exact, one, massive=rows.massive) for one in rounded]
        return replace(
            rows,
            reference=_put(rows.reference, tokens, rounded[0]),
            twin=None if rows.twin is None else _put(rows.twin, tokens, exact),
            floor=None if rows.floor is None else rows.floor.put(tokens, errors[0]),
            widened_floor=None
            if rows.widened_floor is None
            else rows.widened_floor.put(tokens, errors[0].maximum(errors[1])),
        )

    def _replay_weights(self, rows: Rows, tokens: torch.Tensor) -> Rows:
        """Replay the router's weights, which its logits tell for any choice."""
        golden = self._shares(self._read_reference(Site.ROUTER_LOGITS), tokens)
        reference = _put(rows.reference, tokens, golden)
        if self._logits is None:
            return replace(rows, reference=reference)
        exact = self._shares(self._logits, tokens)
        error = square_difference(exact, golden, massive=rows.massive)
        return replace(
            rows,
            reference=reference,
            twin=None if rows.twin is None else _put(rows.twin, tokens, exact),
            floor=None if rows.floor is None else rows.floor.put(tokens, error),
            widened_floor=None
            if rows.widened_floor is None
            else rows.widened_floor.put(tokens, error.times(self._logit_growth()[tokens])),
        )

    def _logit_growth(self) -> torch.Tensor:
        """Return the squared error of variants' logits over the golden's: float64 [T], at least 1."""
        floor = LayerFloor(self._sides.reference, self._sides.batch, layer=self._layer)
        golden_squares, widest = floor.squares(Site.ROUTER_LOGITS), floor.widened_squares(Site.ROUTER_LOGITS)
        if golden_squares is None or widest is None:
            return torch.ones(len(self.flipped), dtype=torch.float64)
        return (widest.whole / golden_squares.whole.clamp(min=TINY)).clamp(min=1.0)

    def _behind(
        self, site: Site, experts: tuple[torch.Tensor, ...], tokens: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, ...]:
        """Return a site behind the experts for each of their outputs [t,H]: exact, and rounded in several ways."""
        if site is Site.MOE_DELTA:
            return experts
        exact, golden = (
            self._sides.read_stream(self._layer, is_exact=is_exact) for is_exact in (True, False)
        )
        assert exact is not None, "the golden holds what its experts added"
        assert golden is not None, "the golden holds what its experts added"
        rounded = ((golden[tokens] + one).to(rows.dtype).float() for one in experts[1:])
        return (exact[tokens] + experts[0], *rounded)

    def _are_experts(self) -> torch.Tensor:
        """Find tokens whose experts the port names by numbers that exist: bool [T]."""
        if self._logits is None:
            return torch.zeros_like(self.flipped)
        return ((self._port_experts >= 0) & (self._port_experts < self._logits.shape[-1])).all(dim=-1)

    def _read(self, site: Site) -> torch.Tensor | None:
        return self._sides.read_exact(self._layer, site)

    def _read_reference(self, site: Site) -> torch.Tensor | None:
        return self._sides.read_golden(self._layer, site)

    def _shares(self, logits: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """Return the shares of the port's experts by the golden's logits, [t,k], experts in ascending order."""
        assert logits is not None, "tokens are replayed where the logits are known"
        return expert_shares(logits[tokens].sigmoid(), self._port_experts[tokens].sort(dim=-1).values)

    def _open(self, source: WeightSource) -> _Opened:
        """Read the layer's weights once, and compute from them."""
        if self._opened is None:
            with source.open_layer(self._layer, self._sides.reference) as weights:
                self._opened = _Opened(
                    bias=weights.tensors[CORRECTION_BIAS].float(),
                    experts=self._compute_experts(weights),
                )
        return self._opened

    def _compute_experts(self, weights: GoldenWeights) -> tuple[torch.Tensor, ...] | None:
        """Return what the port's experts give, [t,H] each: exactly, rounded to nearest, and with a random variant."""
        tokens, states, logits = self._tokens, self._read(Site.POST_NORM), self._logits
        golden, golden_logits = (self._read_reference(site) for site in (Site.POST_NORM, Site.ROUTER_LOGITS))
        if states is None or logits is None or golden is None or golden_logits is None:
            return None
        experts = self._port_experts[tokens]
        shares = [
            expert_shares(side[tokens].sigmoid(), experts) for side in (logits, golden_logits, golden_logits)
        ]
        kinds = torch.tensor([RoundingKind.EXACT, RoundingKind.NEAREST, RoundingKind.RANDOM])
        # One pass: each expert is read and upcast once.
        outputs = upcast_experts(
            weights.tensors,
            torch.cat((states[tokens], golden[tokens], golden[tokens])),
            experts.repeat(len(kinds), 1),
            torch.cat(shares),
            rounding=ExpertRounding(
                rounding=Rounding(seed=self._layer), kinds=kinds.repeat_interleave(len(experts))
            ),
        )
        return tuple(outputs.chunk(len(kinds)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Opened:
    """Values that need the layer's weights.

    Args:
        bias: The correction bias, float32 [E].
        experts: What the port's experts add, float32 [t,H]: exactly, and rounded in two ways; None where the golden did
            not keep their input.
    """

    bias: torch.Tensor
    experts: tuple[torch.Tensor, ...] | None


def _put(rows: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    changed = rows.clone()
    changed[tokens] = values.to(rows.dtype)
    return changed
