"""Evaluation: the decoder layer in float32 as a graph of stages, one for each site; a change replaces some stages.

`Float32Layer` evaluates the right layer, site by site.

B batch, S sequence, H hidden, D head_dim, k experts per token, T tokens, F channels of any site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType

import torch

from minimax_tools.metrics.noise_floor import token_rows
from minimax_tools.model.graph import LayerGraph
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference import float32_stages
from minimax_tools.reference.expert_pass import ExpertJob, LayerWeights, Recipe, run_experts
from minimax_tools.reference.float32_stages import choose_tokens, gain_of, has_all_tokens
from minimax_tools.reference.upcast import upcast_experts
from minimax_tools.text_enum import TextEnum


class ExpertValue(TextEnum):
    """Nodes of the graph within the experts, which no capture shows."""

    EXPERT_INPUT = "expert_input"  # [T,H]
    EXPERT_NUMBERS = "expert_numbers"  # [T,k]: experts whose weights are used, in the order of router_experts
    EXPERT_OUTPUTS = "expert_outputs"  # [T,k,H], before they are multiplied by the routing weights
    ROUTED_SUM = "routed_sum"  # [T,H]: the sum of the routed experts, weighed


GraphNode = Site | ExpertValue
# Sites of the router's choice: numbers of experts without a distance, and their weights, in any order.
CHOICES = (Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS)
Stage = Callable[["Evaluation"], torch.Tensor]


@cache
def node_inputs(graph: LayerGraph) -> Mapping[GraphNode, tuple[GraphNode, ...]]:
    """Return what each node of a layer is computed from."""
    inputs: dict[GraphNode, tuple[GraphNode, ...]] = {
        site: tuple[GraphNode, ...](sources) for site, sources in graph.inputs.items()
    }
    if not graph.is_dense:
        inputs |= {
            ExpertValue.EXPERT_INPUT: (Site.POST_NORM,),
            ExpertValue.EXPERT_NUMBERS: (Site.ROUTER_EXPERTS,),
            ExpertValue.EXPERT_OUTPUTS: (ExpertValue.EXPERT_INPUT, ExpertValue.EXPERT_NUMBERS),
            ExpertValue.ROUTED_SUM: (ExpertValue.EXPERT_OUTPUTS, Site.ROUTER_WEIGHTS),
            graph.routed_sum: (ExpertValue.ROUTED_SUM,),
        }
    return MappingProxyType(inputs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerInputs:
    """Inputs and weights of one layer.

    Positions from `decode_start` on are decoded one at a time, from the golden's keys and values; it is S if none are.
    Rows of one of the `calls` were given together: what mixes tokens of several rows mixes these. `rows` are those of a
    whole batch that are held here.
    """

    spec: ModelSpec
    graph: LayerGraph
    weights: LayerWeights
    attention_mask: torch.Tensor  # 1 on real tokens, int64 [B,S]
    position_ids: torch.Tensor  # int64 [B,S]
    decode_start: int
    calls: tuple[tuple[int, ...], ...] = ()  # rows of each call of the port's layer; () for all rows in one
    # Tokens whose values are kept, bool [B,S]; None for all real tokens. Only these are judged.
    is_kept: torch.Tensor | None = None
    rows: torch.Tensor | None = None  # numbers of the rows that are held, ascending; None for a whole batch

    @classmethod
    def of(cls, spec: ModelSpec, weights: LayerWeights, batch: Inputs) -> LayerInputs:
        """Build the inputs of a whole batch, of which no token is decoded."""
        return LayerInputs(
            spec=spec,
            graph=weights.graph(spec),
            weights=weights,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            decode_start=batch.sequence_length,
        )

    def of_rows(self, rows: torch.Tensor) -> LayerInputs:
        """Return the inputs with some of the rows of a whole batch alone."""
        return replace(
            self,
            attention_mask=self.attention_mask[rows],
            position_ids=self.position_ids[rows],
            is_kept=None if self.is_kept is None else self.is_kept[rows],
            rows=rows,
        )

    def held(self, values: torch.Tensor) -> torch.Tensor:
        """Return the held rows of the values of a whole batch, [B,…]."""
        return values if self.rows is None else values[self.rows]

    def sources(self, within: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """Return a token among all B·S for each of them, int64 [B·S]; -1 for none.

        `within` maps a call's numbers of rows and of tokens in each to a token of the call for each of its tokens.
        """
        length = self.attention_mask.shape[1]
        sources = torch.full((self.attention_mask.numel(),), -1)
        # The last call of a row counts.
        for tokens in self.tokens_by_call:
            local = within(len(tokens) // length, length)
            sources[tokens] = torch.where(local < 0, -1, tokens[local])
        return sources

    @property
    def tokens_by_call(self) -> tuple[torch.Tensor, ...]:
        """Indices among all B·S of the tokens of each call, in its order: int64 [b·S]."""
        batch_size, length = self.attention_mask.shape
        rows_of_calls = self.calls or (tuple(range(batch_size)),)
        return tuple(
            (torch.tensor(rows)[:, None] * length + torch.arange(length)).flatten() for rows in rows_of_calls
        )

    @property
    def is_judged(self) -> torch.Tensor:
        """Tokens that are judged, bool [B,S]."""
        return self.attention_mask.bool() if self.is_kept is None else self.is_kept

    @property
    def judged_tokens(self) -> torch.Tensor:
        """Indices of the judged tokens among all B·S, ascending: int64 [T]."""
        return self.is_judged.flatten().nonzero().flatten()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """A replacement of parts of the layer."""

    stages: Mapping[GraphNode, Stage] = field(default_factory=dict)  # new stages by node
    recipe: Recipe | None = None  # new arithmetic of the experts; None keeps the base's

    @property
    def nodes(self) -> frozenset[GraphNode]:
        """The replaced nodes."""
        experts = () if self.recipe is None else (ExpertValue.EXPERT_OUTPUTS,)
        return frozenset((*self.stages, *experts))

    @property
    def sites(self) -> frozenset[Site]:
        """The sites at which the change first shows; beside shared experts, of the routed ones `sites_in` knows it."""
        return frozenset(node if isinstance(node, Site) else Site.MOE_DELTA for node in self.nodes)

    def sites_in(self, graph: LayerGraph) -> frozenset[Site]:
        """Return the sites of a layer at which the change first shows."""
        return frozenset(node if isinstance(node, Site) else graph.routed_sum for node in self.nodes)

    def and_also(self, other: Change) -> Change:
        """Return both changes as one; if both replace a node, the stage of `other` counts."""
        return Change(stages={**self.stages, **other.stages}, recipe=other.recipe or self.recipe)


class Evaluation:
    """The values of a layer's nodes, computed when they are asked for; `layer[Site.OUTPUT]` is [T,H].

    Nodes before attn_context hold all B·S tokens, [B,S,…] or [B,heads,S,D]. Later ones hold the chosen tokens, [T,…].

    Args:
        inputs: Inputs and weights of the layer.
        stages: Stage of every node.
        tokens: Indices of the chosen tokens among all B·S of the held rows, int64 [T].
        base: Evaluation that gives the nodes that the change does not affect; None for a base itself.
        change: Change of the base; None for a base itself.
        values: Values of nodes that are known already.
        whole: Base with all rows of the batch, if this one holds some; None if it holds all.
    """

    def __init__(
        self,
        inputs: LayerInputs,
        stages: Mapping[GraphNode, Stage],
        *,
        tokens: torch.Tensor,
        base: Evaluation | None = None,
        change: Change | None = None,
        values: Mapping[GraphNode, torch.Tensor] | None = None,
        whole: Evaluation | None = None,
    ) -> None:
        self.inputs = inputs
        # The stages of `float32_stages` read these attributes (see `LayerValues` there).
        self.spec, self.graph, self.weights = inputs.spec, inputs.graph, inputs.weights
        self.attention_mask, self.position_ids = inputs.attention_mask, inputs.position_ids
        self.decode_start = inputs.decode_start
        self.tokens = tokens
        # A base does not hold itself: in a cycle its values would stay in memory until a collection of garbage.
        self._base = base
        self.recipe: Recipe = Recipe() if base is None else base.recipe
        if change and change.recipe:
            self.recipe = change.recipe
        self._stages = {**stages, **(change.stages if change else {})}
        self._affected = _downstream(inputs.graph, change.nodes) if change else frozenset()
        self._values = dict(values or {})
        self._whole = whole
        self._everywhere: Evaluation | None = None

    @property
    def base(self) -> Evaluation:
        """The evaluation that gives the nodes that the change does not affect; a base is its own."""
        return self._base or self

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight of the layer that is no expert's, float32; it is converted once and kept."""
        return self.weights.kept_value(name)

    def gain(self, name: str) -> torch.Tensor:
        """Return what a norm multiplies by, float32, by its weight's name."""
        return gain_of(self.graph.model, self.weight(name))

    def __getitem__(self, node: GraphNode, /) -> torch.Tensor:
        if node in self._values:
            return self._values[node]
        if self._base is not None and node not in self._affected:
            return self._base[node]
        self._values[node] = self._stages[node](self)
        return self._values[node]

    def changed(self, change: Change) -> Evaluation:
        """Return this layer with a change."""
        return Evaluation(self.inputs, self._stages, tokens=self.tokens, base=self, change=change)

    def is_affected(self, node: GraphNode) -> bool:
        """Decide whether the change may touch a node."""
        return node in self._affected

    def set_value(self, node: GraphNode, value: torch.Tensor) -> None:
        """Set a value that was computed elsewhere."""
        self._values[node] = value

    def with_value(self, node: GraphNode, value: torch.Tensor) -> Evaluation:
        """Return this layer, its change included, with another value at a node."""
        return self.changed(Change(stages={node: _constant(value)}))

    @property
    def places(self) -> torch.Tensor:
        """Indices of the chosen tokens among all B·S of the whole batch, int64 [T]."""
        length, rows = self.attention_mask.shape[1], self.inputs.rows
        return self.tokens if rows is None else rows[self.tokens // length] * length + self.tokens % length

    def select_tokens(self, indices: torch.Tensor) -> Evaluation:
        """Return this base, which holds all rows, with the tokens `tokens[indices]`, and their rows, alone.

        Known values are not computed again.
        """
        assert self.inputs.rows is None, "tokens are selected of a whole batch"
        tokens, length = self.tokens[indices], self.attention_mask.shape[1]
        rows, places = (tokens // length).unique(return_inverse=True)
        inputs = self.inputs if len(rows) == len(self.attention_mask) else self.inputs.of_rows(rows)
        values = {
            node: inputs.held(value) if has_all_tokens(node) else value[indices]
            for node, value in self._values.items()
        }
        local = tokens if inputs is self.inputs else places * length + tokens % length
        return Evaluation(inputs, self._stages, tokens=local, values=values, whole=self)

    def everywhere(self) -> Evaluation:
        """Return the base of the whole batch with all B·S tokens, padding too."""
        if self._whole is not None:
            return self._whole.everywhere()
        if self._everywhere is None:
            all_tokens = torch.arange(self.attention_mask.numel())
            values = {node: value for node, value in self._values.items() if has_all_tokens(node)}
            self._everywhere = Evaluation(self.inputs, self._stages, tokens=all_tokens, values=values)
        return self._everywhere

    def chosen(self, rows: torch.Tensor) -> torch.Tensor:
        """Pick the chosen tokens of [B,S,F]: [T,F]."""
        return choose_tokens(self, rows)

    def rows(self, site: Site) -> torch.Tensor:
        """Return the chosen tokens of any site, [T,F]; those of the router's choice as `choice_rows` does."""
        if site in CHOICES:
            weights = self[site] if site is Site.ROUTER_WEIGHTS else None
            return choice_rows(self[Site.ROUTER_EXPERTS], weights, self.spec.num_local_experts)
        value = self[site]
        return self.chosen(token_rows(value, site)) if has_all_tokens(site) else value

    def expert_job(self) -> ExpertJob:
        """Return what `run_experts` needs to compute this evaluation's experts."""
        return ExpertJob(
            graph=self.graph.model,
            states=self[ExpertValue.EXPERT_INPUT],
            experts=self[ExpertValue.EXPERT_NUMBERS],
            shares=self[Site.ROUTER_WEIGHTS],
            recipe=self.recipe,
        )


def _expert_outputs(layer: Evaluation) -> torch.Tensor:
    return run_experts(layer.weights, [layer.expert_job()])[0]


def _moe_delta(layer: Evaluation) -> torch.Tensor:
    if not layer.spec.graph.has_shared_experts:
        return layer.spec.graph.sum_scale * layer[ExpertValue.ROUTED_SUM]
    return layer.spec.graph.sum_scale * layer[Site.ROUTED_DELTA] + layer[Site.SHARED_DELTA]


def _routed_sum(layer: Evaluation) -> torch.Tensor:
    outputs, shares = layer[ExpertValue.EXPERT_OUTPUTS], layer[Site.ROUTER_WEIGHTS]
    # The port's own weights may be of fewer experts than a mistake chooses: then it is not the port's.
    num_experts = min(outputs.shape[1], shares.shape[1])
    return (outputs[:, :num_experts] * shares[:, :num_experts, None]).sum(1)


STAGES: Mapping[GraphNode, Stage] = MappingProxyType(
    {
        **{site: stage for site, stage in float32_stages.STAGES.items()},  # noqa: C416 - wider keys
        ExpertValue.EXPERT_INPUT: lambda layer: layer[Site.POST_NORM],
        ExpertValue.EXPERT_NUMBERS: lambda layer: layer[Site.ROUTER_EXPERTS],
        ExpertValue.EXPERT_OUTPUTS: _expert_outputs,
        ExpertValue.ROUTED_SUM: _routed_sum,
        Site.ROUTED_DELTA: lambda layer: layer[ExpertValue.ROUTED_SUM],
        Site.MOE_DELTA: _moe_delta,
    }
)


class Float32Layer:
    """A decoder layer in float32, which computes one site or all of them.

    `tensors` are the layer's weights by the hub's relative names: each is upcast when it is needed; only experts'
    weights are read again for each use.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self._spec = spec
        self._tensors = tensors
        self._weights = LayerWeights(tensors, keeps=False)

    def run(
        self, hidden_states: torch.Tensor, inputs: Inputs, *, router_experts: torch.Tensor | None
    ) -> dict[Site, torch.Tensor]:
        """Compute every site but the input [B,S,H], float32 on the CPU; no expert runs for padding.

        `router_experts`, int64 [B,S,k], is the choice to replay; None for the layer's own. That of the result is always
        the layer's own.
        """
        # Later sites are computed from the replayed choice; `sites` keeps the layer's own.
        replayed = {} if router_experts is None else {Site.ROUTER_EXPERTS: router_experts.long()}
        sites = {Site.INPUT: hidden_states.float()}
        for site in self._weights.graph(self._spec).sites:
            if site is not Site.INPUT:
                sites[site] = self.compute(site, {**sites, **replayed}, inputs)
        del sites[Site.INPUT]
        return sites

    def compute(self, site: Site, values: Mapping[Site, torch.Tensor], inputs: Inputs) -> torch.Tensor:
        """Compute one site but the input, on the CPU, from at least those that the layer's graph computes it from.

        Values are float32 (experts int64), in the shapes that `Site` gives. No expert runs for padding, which gets 0.
        """
        layer = Evaluation(
            LayerInputs.of(self._spec, self._weights, inputs),
            {**STAGES, self._weights.graph(self._spec).routed_sum: self._run_experts},
            tokens=torch.arange(inputs.attention_mask.numel()),
            values={
                given: value if has_all_tokens(given) else value.flatten(0, 1)
                for given, value in values.items()
                if given is not site
            },
        )
        with torch.no_grad():
            value = layer[site]
        return value if has_all_tokens(site) else value.unflatten(0, inputs.batch_shape)

    def _run_experts(self, layer: Evaluation) -> torch.Tensor:
        is_real = layer.attention_mask.flatten().bool()
        sites = (Site.POST_NORM, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS)
        delta = torch.zeros_like(layer[Site.POST_NORM])
        routed = (layer[site][is_real] for site in sites)
        delta[is_real] = upcast_experts(self._tensors, *routed, graph=layer.spec.graph)
        return delta


def replace_stage(node: GraphNode, stage: Stage) -> Change:
    """Build the change that computes one node by another stage."""
    return Change(stages={node: stage})


def scaled(site: Site, factor: float) -> Change:
    """Build the change that multiplies a site by a factor."""
    return replace_stage(site, lambda layer: factor * STAGES[site](layer))


def with_given(given: Mapping[Site, torch.Tensor]) -> dict[GraphNode, Stage]:
    """Return `STAGES`, but with the values [B,S,…] of `given` sites in place of their stages."""
    replaced: dict[GraphNode, Stage] = {
        site: _held(value) if has_all_tokens(site) else _chosen(value) for site, value in given.items()
    }
    return {**STAGES, **replaced}


def choice_rows(experts: torch.Tensor, weights: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """Return the weight of every expert, float32 [T,E], of the chosen ones, int64 [T,k], and their weights [T,k].

    Without weights, a chosen expert counts 1.
    """
    counted = torch.ones(experts.shape) if weights is None else weights.float()
    return torch.zeros(len(experts), num_experts).scatter_add_(1, experts.long(), counted)


def finite_padding(value: torch.Tensor, site: Site, mask: torch.Tensor) -> torch.Tensor:
    """Return a site [B,S,…] or [B,heads,S,D] as float32, or int64 experts, with no NaN or Inf on padding.

    Else padding keeps its values: a port without a padding mask computes with them. Of experts there it is 0. The mask
    [B,S] is 1 on real tokens.
    """
    is_padding = spread_mask(mask, site) == 0
    if not value.is_floating_point():
        return value.long().masked_fill(is_padding, 0)
    return torch.where(is_padding, value.float().nan_to_num(0.0, 0.0, 0.0), value.float())


def spread_mask(mask: torch.Tensor, site: Site) -> torch.Tensor:
    """Return the mask [B,S] in a shape that broadcasts over a site's values."""
    return mask[:, None, :, None] if site.has_heads_dim else mask[..., None]


def _held(value: torch.Tensor) -> Stage:
    return lambda layer: layer.inputs.held(value)


def _chosen(value: torch.Tensor) -> Stage:
    return lambda layer: layer.chosen(layer.inputs.held(value))


def _constant(value: torch.Tensor) -> Stage:
    return lambda _: value


@cache
def _downstream(graph: LayerGraph, nodes: frozenset[GraphNode]) -> frozenset[GraphNode]:
    reached, num_before = set(nodes), 0
    while len(reached) > num_before:
        num_before = len(reached)
        reached |= {node for node, inputs in node_inputs(graph).items() if reached.intersection(inputs)}
    return frozenset(reached)
