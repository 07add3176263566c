"""Recomputation: a site computed in float32 from the port's own values, so that it is judged alone.

A site that fails behind a failing one may be right, and only inherit its error. So mm2's own layer computes it in
float32 from the port's own values; the remaining difference is the site's own error. The noise to expect is the
golden's, relative to how large the values are.
T real tokens, t those that are judged, E experts, k experts per token, F channels of a site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch

from compare.blame.site_inputs import SiteInputs, Values
from compare.judging.routing import RouterNoise
from compare.noise.rho import foreseen_error_at
from compare.noise.rows import Rows
from compare.noise.squared_errors import TINY, square_difference
from compare.sides.batch import spread_evenly
from compare.sides.golden_weights import GoldenWeights
from compare.sides.sides import Sides
from minimax_tools.capture.source import CaptureSource
from minimax_tools.metrics.noise_floor import choice_margin, token_rows
from minimax_tools.model.inputs import Inputs, decoded_rows
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import SITE_INPUTS, Site
from minimax_tools.model.weight_names import CORRECTION_BIAS
from minimax_tools.reference.float32_layer import Float32Layer
from minimax_tools.reference.upcast import upcast_experts

# Experts are read for so many tokens and no more: those that are furthest off, and others evenly spread.
_MOST_FURTHEST, _MOST_SPREAD = 64, 192
_KEYS_AND_VALUES = (Site.K_ROPE, Site.V_PROJ)


class Recomputation:
    """The golden's layer, computed from the port's values.

    Args:
        sides: The captures; the golden is mm2's own.
        open_weights: Gives its weights; called once, when they are needed.
    """

    def __init__(
        self,
        sides: Sides,
        golden: CaptureSource,
        *,
        layer: int,
        open_weights: Callable[[], GoldenWeights],
    ) -> None:
        self._sides = sides
        self._layer = layer
        self._open_weights = open_weights
        inputs = golden.read_inputs()
        self._position_ids = sides.batch.tokens(inputs.position_ids)
        self._is_decoded = _find_decoded(sides, inputs.attention_mask)
        self._prompt_of = sides.batch.tokens(
            torch.arange(inputs.batch_size)[:, None].expand(inputs.batch_shape)
        )

    @cached_property
    def _weights(self) -> GoldenWeights:
        return self._open_weights()

    @cached_property
    def _float32_layer(self) -> Float32Layer:
        return Float32Layer(self._weights.spec, self._weights.tensors)

    def rows(self, site: Site, stored: Rows, *, doubted: frozenset[Site]) -> Iterator[Rows]:
        """Yield rows of a site whose golden is computed from the port's own values.

        First come all values that the port shows. These may be copies of the values that it computes with, scaled or
        in another order. So the golden's take the place of doubted ones next: a site that is right with any is right.

        Args:
            site: Any whose values are judged.
            stored: As both sides stored them. Without a floor they are judged by their relative error, which does not
                know how attention's scores are rounded: of `attn_context` nothing is then told.
            doubted: Sites that are wrong by themselves.

        Yields:
            Those tokens of which all that the site is computed from is finite; of `moe_delta` some of them. Nothing
            where a side lacks what the site is computed from.
        """
        site_inputs = self._read(site)
        if site_inputs is None or (site is Site.ATTN_CONTEXT and not stored.has_floor):
            return
        tokens = site_inputs.usable
        if site is Site.MOE_DELTA:
            tokens = tokens & _sample(stored)
        if not bool(tokens.any()):
            return
        selected = stored.select(tokens)
        for number, (values, computed) in enumerate(
            self._compute_variants(site, site_inputs, tokens, doubted)
        ):
            floor = foreseen_error_at(selected, computed) if stored.has_floor else None
            if floor is not None and site is Site.ATTN_CONTEXT:
                floor = floor.times(self._score_growth(values, site_inputs.golden)[tokens].square())
            is_finite = computed.isfinite().all() & (floor is None or floor.whole.isfinite().all())
            if bool(is_finite):
                yield Rows(
                    reference=computed,
                    target=selected.target,
                    massive=selected.massive,
                    places=selected.places,
                    floor=floor,
                    # The limits are those of the golden's floor: it is the widened one that was scaled.
                    widened_floor=None if selected.widened_floor is None else floor,
                    stored_dtype=selected.dtype,
                )
            elif number == 0:
                # What the port shows is too large to tell anything of what is computed from it.
                return

    def can_feed(self, site: Site) -> bool:
        """Decide whether both sides hold the site's inputs, in one shape and finite."""
        site_inputs = self._read(site)
        return site_inputs is not None and bool(site_inputs.usable.all())

    def choice(self, noise: RouterNoise) -> tuple[torch.Tensor, RouterNoise] | None:
        """Return the experts [T,k] that the port's own logits choose, and how close that choice is.

        Args:
            noise: Of the golden's choice.
        """
        site_inputs = self._read(Site.ROUTER_EXPERTS)
        if site_inputs is None or not bool(site_inputs.usable.all()):
            return None
        golden, port = (side[Site.ROUTER_LOGITS] for side in (site_inputs.golden, site_inputs.port))
        growth = (_lengths(port) / _lengths(golden)).clamp(min=1.0)
        if not bool(growth.isfinite().all()):
            return None
        k = self._weights.spec.num_experts_per_tok
        scores = port.sigmoid() + self._weights.tensors[CORRECTION_BIAS].float()
        margin = choice_margin(scores, k)
        return scores.topk(k, dim=-1).indices, RouterNoise(
            margin=margin, noise=noise.noise * growth, scores=scores
        )

    def _read(self, site: Site) -> SiteInputs | None:
        return SiteInputs.read(site, sides=self._sides, layer=self._layer, prompt_of=self._prompt_of)

    def _compute_variants(
        self, site: Site, site_inputs: SiteInputs, tokens: torch.Tensor, doubted: frozenset[Site]
    ) -> Iterator[tuple[Values, torch.Tensor]]:
        """Yield possible inputs of the site, [T,F] each, and the site computed from them at the `tokens`, [t,F]."""
        router = self._read(Site.ROUTER_WEIGHTS) if site is Site.MOE_DELTA else None
        variants = site_inputs.variants(doubted, router)
        first = next(variants)
        yield first, self._compute(site, first, tokens, golden=site_inputs.golden)
        if site is not Site.MOE_DELTA:
            for values in variants:
                yield values, self._compute(site, values, tokens, golden=site_inputs.golden)
            return
        others = list(variants)
        if others:
            # Each expert is read once for all of them.
            joined = {
                name: torch.cat([values[name][tokens] for values in others]) for name in SITE_INPUTS[site]
            }
            computed = self._run(site, joined, self._position_ids[tokens].repeat(len(others)))
            yield from zip(others, computed.chunk(len(others)), strict=True)

    def _compute(self, site: Site, values: Values, tokens: torch.Tensor, *, golden: Values) -> torch.Tensor:
        """Compute the site's rows at the `tokens`, bool [T]: [t,F] float32 (experts int64)."""
        if site is not Site.ATTN_CONTEXT:
            return self._run(site, _select(values, tokens), self._position_ids[tokens])
        prompts = [self._prompt_of == prompt for prompt in self._prompt_of[tokens].unique().tolist()]
        return torch.cat([self._attend(_select(values, one), _select(golden, one), one) for one in prompts])

    def _attend(self, values: Values, golden: Values, prompt: torch.Tensor) -> torch.Tensor:
        """Compute attention over one prompt, [t,F], from its values [t,…]; decoded rows see the golden's past.

        Args:
            values: What the port computed it from.
            golden: The golden's, from which it decoded.
            prompt: The prompt's tokens, bool [T].
        """
        positions = self._position_ids[prompt]
        context = self._run(Site.ATTN_CONTEXT, values, positions)
        for token in self._is_decoded[prompt].nonzero()[:, 0].tolist():
            known = slice(token + 1)
            past = {site: golden[site][known].clone() for site in _KEYS_AND_VALUES}
            for site, rows in past.items():
                rows[token] = values[site][token]
            of_token = {**{site: rows[known] for site, rows in values.items()}, **past}
            context[token] = self._run(Site.ATTN_CONTEXT, of_token, positions[known])[-1]
        return context

    def _run(self, site: Site, values: Values, position_ids: torch.Tensor) -> torch.Tensor:
        """Compute the site's rows [t,F] as if all were one prompt without padding; most stages mix no tokens."""
        if site is Site.MOE_DELTA:
            inputs = (values[source] for source in SITE_INPUTS[site])
            return upcast_experts(self._weights.tensors, *inputs)
        head_dim = self._weights.spec.head_dim
        shaped = {
            source: rows.unflatten(-1, (-1, head_dim)).transpose(0, 1)[None]
            if source.has_heads_dim
            else rows[None]
            for source, rows in values.items()
        }
        return token_rows(self._float32_layer.compute(site, shaped, _as_one_prompt(position_ids)), site)[0]

    def _score_growth(self, values: Values, golden: Values) -> torch.Tensor:
        """Return attention's largest score over the golden's, never below 1: float64 [T].

        They are rounded relative to their size, which then counts in full.
        """
        queries = _lengths(values[Site.Q_ROPE]) / _lengths(golden[Site.Q_ROPE])
        port_lengths, golden_lengths = _lengths(values[Site.K_ROPE]), _lengths(golden[Site.K_ROPE])
        growth = torch.ones_like(queries)
        for prompt in self._prompt_of.unique().tolist():
            tokens = self._prompt_of == prompt
            longest, before = (side[tokens].cummax(dim=0).values for side in (port_lengths, golden_lengths))
            longest = torch.where(
                self._is_decoded[tokens], torch.maximum(before, port_lengths[tokens]), longest
            )
            growth[tokens] = (queries[tokens] * longest / before).clamp(min=1.0)
        return growth


def _find_decoded(sides: Sides, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the tokens that the port decoded from the golden's keys and values, bool [T], by the mask [B,S]."""
    description = sides.target.known_description
    is_decoded = torch.zeros_like(attention_mask, dtype=torch.bool)
    if description is not None and description.run.decode_rows and description.run.mode is Mode.ISOLATED:
        rows = decoded_rows(attention_mask, description.run.decode_rows)
        is_decoded[:, rows.start : rows.stop] = True
    return sides.batch.tokens(is_decoded)


def _select(values: Values, tokens: torch.Tensor) -> Values:
    return {site: rows[tokens] for site, rows in values.items()}


def _sample(stored: Rows) -> torch.Tensor:
    """Choose the tokens that experts are run for, bool [T]: those furthest from the golden, others evenly spread."""
    num_tokens = stored.num_tokens
    chosen = torch.zeros(num_tokens, dtype=torch.bool)
    chosen[spread_evenly(num_tokens, _MOST_SPREAD)] = True
    error = square_difference(stored.reference, stored.target, massive=stored.massive).whole
    chosen[error.nan_to_num(nan=torch.inf).topk(min(num_tokens, _MOST_FURTHEST)).indices] = True
    return chosen


def _lengths(rows: torch.Tensor) -> torch.Tensor:
    """Return the norms of rows [T,F], float64 [T], above 0."""
    lengths: torch.Tensor = rows.double().norm(dim=-1)
    return lengths.clamp(min=TINY)


def _as_one_prompt(position_ids: torch.Tensor) -> Inputs:
    """Build inputs [1,t] of tokens at these positions [t], none of them padding."""
    positions = position_ids[None]
    return Inputs(
        input_ids=torch.zeros_like(positions),
        attention_mask=torch.ones_like(positions),
        position_ids=positions,
        source="the port's own values",
    )
