"""Recomputation: a site computed in float32 from the port's own values of its inputs, so that it is judged alone.

The noise to expect is the golden's noise floor, scaled to these values.
T real tokens, t of them judged, k experts per token, F channels of a site.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from compare.judging.layer_judge import LayerJudge
from compare.judging.routing import RouterNoise
from compare.noise.rho import foreseen_error_at
from compare.noise.rows import TINY, Rows, square_difference
from compare.sides.golden_weights import GoldenWeights
from compare.sides.pairing import find_mismatch
from compare.sides.sides import Sides, spread_evenly
from minimax_tools.metrics.noise_floor import choice_margin, token_rows
from minimax_tools.model.graph import LayerGraph
from minimax_tools.model.inputs import Inputs, decoded_columns
from minimax_tools.model.router import Router, weigh_experts
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Float32Layer
from minimax_tools.results.results import SiteResult, SiteStatus

# Rows [T,F] by site, float32; experts are int64.
Values = Mapping[Site, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteInputs:
    """Inputs of one site, on both sides."""

    site: Site
    graph: LayerGraph
    golden: Values
    port: Values
    usable: torch.Tensor  # tokens whose values in `port` are finite, and whose experts exist, bool [T]

    @classmethod
    def read(cls, site: Site, *, sides: Sides, layer: int, prompt_of: torch.Tensor) -> SiteInputs | None:
        """Read both sides' inputs of a site; None if a side lacks one, or holds it in another shape."""
        if site is Site.ATTN_CONTEXT and sides.reference.keeps_last_tokens:
            # Attention reads the keys and values of every token, and those of the last are here.
            return None
        golden: dict[Site, torch.Tensor] = {}
        port: dict[Site, torch.Tensor] = {}
        usable = torch.ones_like(prompt_of, dtype=torch.bool)
        for source in sides.reference.graph.layer(layer).inputs[site]:
            rows = sides.read_rows(layer, source)
            if rows is None:
                return None
            golden[source], port[source] = (_as_computed(source, side, site) for side in rows)
            usable &= _are_usable(port[source], sides, layer)
        if site is Site.ATTN_CONTEXT:
            # Tokens attend to others of their prompt: one that is not usable spoils all of its prompt.
            usable = ~torch.isin(prompt_of, prompt_of[~usable])
        return cls(
            site=site, graph=sides.reference.graph.layer(layer), golden=golden, port=port, usable=usable
        )

    def possible_inputs(self, doubted: frozenset[Site], router: SiteInputs | None) -> Iterator[Values]:
        """Yield possible inputs of the port's site, to recompute it from each: first the values that the port shows."""
        groups = [[source] for source in self.graph.inputs[self.site]]
        if self.site is self.graph.routed_sum:
            # A choice and its weights go together.
            groups = [[Site.POST_NORM], [Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS]]
        alternatives = [list(self._alternatives(group, doubted, router)) for group in groups]
        for combination in itertools.product(*alternatives):
            values = {source: rows for part in combination for source, rows in part.items()}
            # Without any of the port's values, the golden's own site would be judged.
            if any(values[source] is not self.golden[source] for source in values):
                yield values

    def _alternatives(
        self, group: list[Site], doubted: frozenset[Site], router: SiteInputs | None
    ) -> Iterator[Values]:
        """Yield the port's values of a group of sites, and values that may stand in for doubted ones."""
        yield {site: self.port[site] for site in group}
        if not doubted & set(group):
            return
        if Site.ROUTER_WEIGHTS in group and router is not None and bool(router.usable.all()):
            # The right weights in the order of the experts, whatever order the port shows its weights in.
            experts = self.port[Site.ROUTER_EXPERTS]
            shares = weigh_experts(self.graph.model, router.port[Site.ROUTER_LOGITS], experts)
            yield {Site.ROUTER_EXPERTS: experts, Site.ROUTER_WEIGHTS: shares}
        yield {site: self.golden[site] for site in group}


def _as_computed(site: Site, rows: torch.Tensor, consumer: Site) -> torch.Tensor:
    """Return rows [T,F] of a site in the form in which its consumer is computed from them."""
    if site is not Site.ROUTER_EXPERTS:
        return rows.float()
    # The router's weights are judged in the order of their experts.
    return rows.long().sort(dim=-1).values if consumer is Site.ROUTER_WEIGHTS else rows.long()


def _are_usable(rows: torch.Tensor, sides: Sides, layer: int) -> torch.Tensor:
    """Find tokens whose values can be computed with, bool [T]: finite ones, and experts that exist."""
    if rows.is_floating_point():
        return rows.isfinite().all(dim=-1)
    # The golden's logits tell which experts exist.
    if Site.ROUTER_LOGITS not in sides.reference.sites(layer):
        return torch.zeros(len(rows), dtype=torch.bool)
    num_experts = sides.reference.read(layer, Site.ROUTER_LOGITS).shape[-1]
    return ((rows >= 0) & (rows < num_experts)).all(dim=-1)


# Tokens for which the experts are run, at most: those furthest from the golden, and others evenly spread.
_MOST_FURTHEST, _MOST_SPREAD = 64, 192
_KEYS_AND_VALUES = (Site.K_ROPE, Site.V_PROJ)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recomputed:
    """A site judged on the port's own values of its inputs."""

    result: SiteResult
    rows: Rows | None = None  # the judged rows; None for a choice of experts, and for a wrong shape or dtype
    own: frozenset[Site] = frozenset()  # the inputs of which the port's values were taken, not the golden's


class RecomputingJudge:
    """Judges sites of one layer, computed from the port's own values of their inputs.

    The layer's input is the golden's. Nothing is judged without weights, of another tool's golden, and by fixed limits.
    """

    def __init__(self, sides: Sides, *, layer: int, judge: LayerJudge) -> None:
        self._sides = sides
        self._layer = layer
        self._judge = judge
        self._stack = ExitStack()
        can_compute = not sides.is_classic and sides.reference.known_description is not None
        self._source = sides.weights if can_compute else None

    @property
    def graph(self) -> LayerGraph:
        """The layer's data flow."""
        return self._sides.reference.graph.layer(self._layer)

    def __enter__(self) -> RecomputingJudge:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _name_inputs(self, result: SiteResult) -> SiteResult:
        if not result.reason:
            return result
        inputs = sorted(self.graph.inputs[Site(result.site)], key=lambda site: site.order)
        names = ", ".join(str(site) for site in inputs)
        return replace(result, reason=f"{result.reason}, given the port's own {names}")

    def judge_sites(self, sites: tuple[Site, ...], *, failing: frozenset[Site]) -> Mapping[Site, Recomputed]:
        """Judge some sites, in execution order, as far as they can be computed; `failing` are all that fail.

        Raises:
            IncomparableError: The weights are another model's.
            CheckpointError: They cannot be read.
        """
        judged: dict[Site, Recomputed] = {}
        # Sites that may be wrong by themselves; one that is right on the port's own values is not.
        doubted = set(failing)
        for site in sites:
            recomputed = self._judge_site(site, doubted=frozenset(doubted))
            if recomputed is not None:
                judged[site] = recomputed
                if recomputed.result.status is not SiteStatus.FAIL:
                    doubted.discard(site)
        return judged

    def judgements(self, site: Site, *, doubted: frozenset[Site]) -> Iterator[Recomputed]:
        """Yield the judgements of one site on each of its possible inputs; none if it cannot be computed."""
        reference, target = self._sides.reference, self._sides.target
        if self._source is None:
            return
        held = set(reference.sites(self._layer)) & set(target.sites(self._layer))
        if not {site, *self.graph.inputs[site]} <= held:
            return
        result = SiteResult(layer=self._layer, site=str(site), status=SiteStatus.FAIL)
        mismatch = find_mismatch(reference.read(self._layer, site), target.read(self._layer, site))
        if mismatch is not None:
            # A wrong shape or dtype is the site's own fault if its inputs have the right ones.
            if self._has_inputs(site):
                yield Recomputed(result=replace(result, reason=mismatch))
        elif site is Site.ROUTER_EXPERTS:
            yield from self._judge_choice(result)
        else:
            stored = self._judge.stored_rows(site)
            for rows, own in self._rows(site, stored, doubted=doubted):
                yield Recomputed(
                    result=self._name_inputs(self._judge.judge_rows(site, rows)), rows=rows, own=own
                )

    def _judge_choice(self, result: SiteResult) -> Iterator[Recomputed]:
        noise = self._judge.router_noise
        choice = None if noise is None else self._choice(noise)
        if choice is not None:
            judged = self._judge.judge_choice(result, *choice)
            yield Recomputed(result=self._name_inputs(judged), own=frozenset({Site.ROUTER_LOGITS}))

    def _judge_site(self, site: Site, *, doubted: frozenset[Site]) -> Recomputed | None:
        """Judge one site on each of its possible inputs: it passes if it does on any; None if none can be computed."""
        first: Recomputed | None = None
        for recomputed in self.judgements(site, doubted=doubted):
            if recomputed.result.status is not SiteStatus.FAIL:
                return recomputed
            first = first or recomputed
        return first

    @cached_property
    def _weights(self) -> GoldenWeights:
        assert self._source is not None, "without weights nothing is recomputed"
        return self._stack.enter_context(self._source.open_layer(self._layer, self._sides.reference))

    @cached_property
    def _float32_layer(self) -> Float32Layer:
        return Float32Layer(self._weights.spec, self._weights.tensors)

    @cached_property
    def _position_ids(self) -> torch.Tensor:
        return self._sides.batch.tokens(self._sides.reference.read_inputs().position_ids)

    @cached_property
    def _is_decoded(self) -> torch.Tensor:
        return _find_decoded(self._sides, self._sides.reference.read_inputs().attention_mask)

    @cached_property
    def _prompt_of(self) -> torch.Tensor:
        """The number of each token's prompt, int64 [T]."""
        inputs = self._sides.reference.read_inputs()
        prompts = torch.arange(inputs.batch_size)[:, None].expand(inputs.batch_shape)
        return self._sides.batch.tokens(prompts)

    def _rows(
        self, site: Site, stored: Rows, *, doubted: frozenset[Site]
    ) -> Iterator[tuple[Rows, frozenset[Site]]]:
        """Yield rows of a site whose golden is computed from possible inputs, and which inputs are the port's own.

        The site is not the choice of experts; `stored` are both sides' rows of it. Tokens are those whose inputs are
        all finite; of `moe_delta` a sample. Nothing comes if a side lacks an input, and nothing of `attn_context`
        without a floor: a relative error does not know how scores are rounded.
        """
        site_inputs = self._read(site)
        if site_inputs is None or (site is Site.ATTN_CONTEXT and not stored.has_floor):
            return
        tokens = site_inputs.usable
        if site is self.graph.routed_sum:
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

    def _has_inputs(self, site: Site) -> bool:
        """Decide whether both sides hold the site's inputs, in one shape and finite."""
        site_inputs = self._read(site)
        return site_inputs is not None and bool(site_inputs.usable.all())

    def _choice(self, noise: RouterNoise) -> tuple[torch.Tensor, RouterNoise] | None:
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
        scores = Router.of(self._weights.spec, self._weights.tensors).ranking(port)
        choice_noise = RouterNoise(margin=choice_margin(scores, k), noise=noise.noise * growth, scores=scores)
        return scores.topk(k, dim=-1).indices, choice_noise

    def _read(self, site: Site) -> SiteInputs | None:
        return SiteInputs.read(site, sides=self._sides, layer=self._layer, prompt_of=self._prompt_of)

    def _compute_variants(
        self, site: Site, site_inputs: SiteInputs, tokens: torch.Tensor, doubted: frozenset[Site]
    ) -> Iterator[tuple[Values, torch.Tensor]]:
        """Yield possible inputs of a site, [T,F] each, with the site computed from them at the `tokens`, [t,F]."""
        router = self._read(Site.ROUTER_WEIGHTS) if site is self.graph.routed_sum else None
        variants = site_inputs.possible_inputs(doubted, router)
        first = next(variants)
        yield first, self._compute(site, first, tokens, golden=site_inputs.golden)
        if site is not self.graph.routed_sum:
            for values in variants:
                yield values, self._compute(site, values, tokens, golden=site_inputs.golden)
            return
        others = list(variants)
        if others:
            # In one call, so that each expert is read once for all of them.
            joined = {
                name: torch.cat([values[name][tokens] for values in others])
                for name in self.graph.inputs[site]
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
