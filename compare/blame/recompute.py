"""Recomputation: a site computed in float32 from the port's own values of its inputs, so that it is judged alone.

A site that fails behind a failing one may be right, and only inherit its error. So mm2's own float32 layer computes it
from the port's values; the remaining difference is the site's own error. The noise to expect is the golden's noise
floor, scaled to these values.
T real tokens, t of them judged, k experts per token, F channels of a site.
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
from minimax_tools.metrics.noise_floor import choice_margin, token_rows
from minimax_tools.model.inputs import Inputs, decoded_columns
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import SITE_INPUTS, Site
from minimax_tools.model.weight_names import CORRECTION_BIAS
from minimax_tools.reference.float32_layer import Float32Layer
from minimax_tools.reference.upcast import upcast_experts

# Tokens for which the experts are run, at most: those furthest from the golden, and others evenly spread.
_MOST_FURTHEST, _MOST_SPREAD = 64, 192
_KEYS_AND_VALUES = (Site.K_ROPE, Site.V_PROJ)


class Recomputation:
    """Sites of one layer, computed from the port's values; the golden of `sides` is mm2's own.

    `open_weights` opens the layer's weights; it is called once, when they are needed.
    """

    def __init__(self, sides: Sides, *, layer: int, open_weights: Callable[[], GoldenWeights]) -> None:
        self._sides = sides
        self._layer = layer
        self._open_weights = open_weights
        inputs = sides.reference.read_inputs()
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

    def rows(
        self, site: Site, stored: Rows, *, doubted: frozenset[Site]
    ) -> Iterator[tuple[Rows, frozenset[Site]]]:
        """Yield rows of a site whose golden is computed from possible inputs (see `SiteInputs.possible_inputs`).

        With each, the inputs of which the port's own values were taken.

        First from what the port shows; this may be a scaled or reordered copy of what it computes with. So next with
        the golden's values for `doubted` sites, which may be wrong by themselves. A site that is right with any of them
        is right. The site is not the choice of experts; `stored` are both sides' rows of it.

        Yields:
            Tokens whose inputs are all finite; of `moe_delta` a sample of them. Nothing if a side lacks an input, and
            nothing of `attn_context` without a floor: a relative error does not know how scores are rounded.
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
                own = frozenset(name for name in values if values[name] is not site_inputs.golden[name])
                rows = Rows(
                    reference=computed,
                    target=selected.target,
                    massive=selected.massive,
                    places=selected.places,
                    floor=floor,
                    # Set if the golden's is, since that selects the limits; `floor` is scaled from the widened one.
                    widened_floor=None if selected.widened_floor is None else floor,
                    stored_dtype=selected.dtype,
                    num_roundings=selected.num_roundings,
                )
                yield rows, own
            elif number == 0:
                # The port's own values, which come first, are so large that what is computed from them overflows.
                return

    def has_inputs(self, site: Site) -> bool:
        """Decide whether both sides hold the site's inputs, in one shape and finite."""
        site_inputs = self._read(site)
        return site_inputs is not None and bool(site_inputs.usable.all())

    def choice(self, noise: RouterNoise) -> tuple[torch.Tensor, RouterNoise] | None:
        """Return the experts [T,k] that the port's own logits choose, with the margin and noise of that choice.

        Its noise is that of the golden's choice, and grows with the logits. None if a side lacks finite logits.
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
        choice_noise = RouterNoise(margin=choice_margin(scores, k), noise=noise.noise * growth, scores=scores)
        return scores.topk(k, dim=-1).indices, choice_noise

    def _read(self, site: Site) -> SiteInputs | None:
        return SiteInputs.read(site, sides=self._sides, layer=self._layer, prompt_of=self._prompt_of)

    def _compute_variants(
        self, site: Site, site_inputs: SiteInputs, tokens: torch.Tensor, doubted: frozenset[Site]
    ) -> Iterator[tuple[Values, torch.Tensor]]:
        """Yield possible inputs of a site, [T,F] each, with the site computed from them at the `tokens`, [t,F]."""
        router = self._read(Site.ROUTER_WEIGHTS) if site is Site.MOE_DELTA else None
        variants = site_inputs.possible_inputs(doubted, router)
        first = next(variants)
        yield first, self._compute(site, first, tokens, golden=site_inputs.golden)
        if site is not Site.MOE_DELTA:
            for values in variants:
                yield values, self._compute(site, values, tokens, golden=site_inputs.golden)
            return
        others = list(variants)
        if others:
            # In one call, so that each expert is read once for all of them.
            joined = {
                name: torch.cat([values[name][tokens] for values in others]) for name in SITE_INPUTS[site]
            }
            computed = self._run(site, joined, self._position_ids[tokens].repeat(len(others)))
            yield from zip(others, computed.chunk(len(others)), strict=True)

    def _compute(self, site: Site, values: Values, tokens: torch.Tensor, *, golden: Values) -> torch.Tensor:
        """Compute the site's rows at the `tokens`, bool [T]: [t,F] float32 (experts int64)."""
        if site is not Site.ATTN_CONTEXT:
            return self._run(site, _select(values, tokens), self._position_ids[tokens])
        contexts = []
        for prompt in self._prompt_of[tokens].unique().tolist():
            of_prompt = self._prompt_of == prompt
            contexts.append(self._attend(_select(values, of_prompt), _select(golden, of_prompt), of_prompt))
        return torch.cat(contexts)

    def _attend(self, values: Values, golden: Values, prompt: torch.Tensor) -> torch.Tensor:
        """Compute attention over the tokens of one prompt, bool [T], from the port's values [t,F] of its inputs.

        Decoded tokens attend to the golden's keys and values, which filled the cache that the port decoded from.
        """
        positions = self._position_ids[prompt]
        context = self._run(Site.ATTN_CONTEXT, values, positions)
        for token in self._is_decoded[prompt].nonzero()[:, 0].tolist():
            up_to_token = slice(token + 1)
            cache = {site: golden[site][up_to_token].clone() for site in _KEYS_AND_VALUES}
            for site, rows in cache.items():
                rows[token] = values[site][token]
            of_token = {**{site: rows[up_to_token] for site, rows in values.items()}, **cache}
            context[token] = self._run(Site.ATTN_CONTEXT, of_token, positions[up_to_token])[-1]
        return context

    def _run(self, site: Site, values: Values, position_ids: torch.Tensor) -> torch.Tensor:
        """Compute a site's rows [t,F] as one prompt without padding; only attention mixes tokens, one prompt a call."""
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
        """Bound the port's attention scores over the golden's, at least 1: float64 [T].

        Scores are rounded relative to their size, so the noise of attention grows with them. The bound is the length of
        the query times that of the longest key that the token attends to.
        """
        queries = _lengths(values[Site.Q_ROPE]) / _lengths(golden[Site.Q_ROPE])
        port_lengths, golden_lengths = _lengths(values[Site.K_ROPE]), _lengths(golden[Site.K_ROPE])
        growth = torch.ones_like(queries)
        for prompt in self._prompt_of.unique().tolist():
            tokens = self._prompt_of == prompt
            port_longest, golden_longest = (
                side[tokens].cummax(dim=0).values for side in (port_lengths, golden_lengths)
            )
            # A decoded token attends to the golden's keys, and to its own.
            longest_with_cache = torch.maximum(golden_longest, port_lengths[tokens])
            port_longest = torch.where(self._is_decoded[tokens], longest_with_cache, port_longest)
            growth[tokens] = (queries[tokens] * port_longest / golden_longest).clamp(min=1.0)
        return growth


def _find_decoded(sides: Sides, attention_mask: torch.Tensor) -> torch.Tensor:
    """Find the tokens that the port decoded from the golden's keys and values, bool [T]; the mask is [B,S]."""
    description = sides.target.known_description
    is_decoded = torch.zeros_like(attention_mask, dtype=torch.bool)
    if description is not None and description.run.num_decoded and description.run.mode is Mode.ISOLATED:
        columns = decoded_columns(attention_mask, description.run.num_decoded)
        is_decoded[:, columns.start : columns.stop] = True
    return sides.batch.tokens(is_decoded)


def _select(values: Values, tokens: torch.Tensor) -> Values:
    return {site: rows[tokens] for site, rows in values.items()}


def _sample(stored: Rows) -> torch.Tensor:
    """Choose the tokens for which the experts are run, bool [T]."""
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
