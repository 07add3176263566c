"""Evaluation: the decoder layer in float32 as a graph of stages, one for each site; a change replaces some of them.

What lies upstream of a change is taken from the base; what lies downstream is computed when it is asked for.
B batch, S sequence, H hidden, N heads, K kv heads, D head_dim, E experts, k experts per token, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from compare.diagnosis.expert_pass import ExpertJob, Recipe, run_experts
from compare.diagnosis.layer_weights import LayerWeights
from minimax_tools.metrics.noise_floor import token_rows
from minimax_tools.model.sites import SITE_INPUTS, Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference import float32_stages
from minimax_tools.reference.float32_stages import choose_rows, has_all_rows
from minimax_tools.text_enum import TextEnum


class ExpertValue(TextEnum):
    """Points within the experts that are no sites."""

    EXPERT_INPUT = "expert_input"  # [T,H]
    EXPERT_NUMBERS = "expert_numbers"  # [T,k], whose weights are used; in the order of router_experts
    EXPERT_OUTPUTS = "expert_outputs"  # [T,k,H], not weighed yet


GraphNode = Site | ExpertValue
Stage = Callable[["Evaluation"], torch.Tensor]

NODE_INPUTS: Mapping[GraphNode, tuple[GraphNode, ...]] = MappingProxyType(
    {
        **{site: tuple[GraphNode, ...](inputs) for site, inputs in SITE_INPUTS.items()},
        ExpertValue.EXPERT_INPUT: (Site.POST_NORM,),
        ExpertValue.EXPERT_NUMBERS: (Site.ROUTER_EXPERTS,),
        ExpertValue.EXPERT_OUTPUTS: (ExpertValue.EXPERT_INPUT, ExpertValue.EXPERT_NUMBERS),
        Site.MOE_DELTA: (ExpertValue.EXPERT_OUTPUTS, Site.ROUTER_WEIGHTS),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerInputs:
    """Inputs and weights of one layer.

    Args:
        attention_mask: int64 [B,S].
        position_ids: int64 [B,S].
        decode_start: First of the rows that are computed one at a time from the golden's keys and values; S for none.
    """

    spec: ModelSpec
    weights: LayerWeights
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    decode_start: int

    @property
    def real_tokens(self) -> torch.Tensor:
        """The real tokens' places among all B·S, ascending: int64 [T]."""
        return self.attention_mask.flatten().nonzero().flatten()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """A replacement of parts of the layer.

    Args:
        stages: New stages by node.
        recipe: How experts compute, where that changes.
    """

    stages: Mapping[GraphNode, Stage] = field(default_factory=dict)
    recipe: Recipe | None = None

    @property
    def nodes(self) -> frozenset[GraphNode]:
        """Nodes that it replaces."""
        experts = () if self.recipe is None else (ExpertValue.EXPERT_OUTPUTS,)
        return frozenset((*self.stages, *experts))

    @property
    def sites(self) -> frozenset[Site]:
        """The sites at which it first shows."""
        return frozenset(node if isinstance(node, Site) else Site.MOE_DELTA for node in self.nodes)

    def and_also(self, other: Change) -> Change:
        """Return both changes as one; where both replace a node, the other's stage counts."""
        return Change(stages={**self.stages, **other.stages}, recipe=other.recipe or self.recipe)


class Evaluation:
    """The values of a layer's nodes, computed when they are asked for; `evaluation[Site.OUTPUT]` is [T,H].

    Nodes before attention's context have all rows, [B,S,…] or [B,heads,S,D]; later ones the chosen tokens', [T,…].

    Args:
        scene: What the layer is run on.
        stages: The stage of every node.
        tokens: The chosen tokens' places among all B·S, int64 [T].
        base: Gives what no change touches; None for the base itself.
        change: What is changed.
        values: What is known already.
    """

    def __init__(
        self,
        scene: LayerInputs,
        stages: Mapping[GraphNode, Stage],
        *,
        tokens: torch.Tensor,
        base: Evaluation | None = None,
        change: Change | None = None,
        values: Mapping[GraphNode, torch.Tensor] | None = None,
    ) -> None:
        self.scene = scene
        self.tokens = tokens
        self.base = base or self
        # Experts compute as in the base, unless the change says otherwise.
        self.recipe: Recipe = (change and change.recipe) or (Recipe() if base is None else base.recipe)
        self._stages = {**stages, **(change.stages if change else {})}
        self._affected = _downstream(change.nodes) if change else frozenset()
        self._values = dict(values or {})
        self._everywhere: Evaluation | None = None

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.scene.spec

    @property
    def weights(self) -> LayerWeights:
        """The layer's weights."""
        return self.scene.weights

    @property
    def attention_mask(self) -> torch.Tensor:
        """1 on real tokens: int64 [B,S]."""
        return self.scene.attention_mask

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions: int64 [B,S]."""
        return self.scene.position_ids

    @property
    def decode_start(self) -> int:
        """First row that is decoded from the golden's keys and values; S for none."""
        return self.scene.decode_start

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight of the layer, but for experts, float32; made once."""
        return self.scene.weights.kept_value(name)

    def __getitem__(self, node: GraphNode, /) -> torch.Tensor:
        if self.base is not self and node not in self._affected and node not in self._values:
            return self.base[node]
        if node not in self._values:
            self._values[node] = self._stages[node](self)
        return self._values[node]

    def changed(self, change: Change) -> Evaluation:
        """Return this layer with a change."""
        return Evaluation(self.scene, self._stages, tokens=self.tokens, base=self, change=change)

    def is_affected(self, node: GraphNode) -> bool:
        """Decide whether the change may touch a node."""
        return node in self._affected

    def give(self, node: GraphNode, value: torch.Tensor) -> None:
        """Set a value that was computed elsewhere."""
        self._values[node] = value

    def with_value(self, node: GraphNode, value: torch.Tensor) -> Evaluation:
        """Return this layer, its change included, with another value at a node."""
        given = Change(stages={node: _constant(value)})
        return Evaluation(self.scene, self._stages, tokens=self.tokens, base=self, change=given)

    def at(self, places: torch.Tensor) -> Evaluation:
        """Return this base with some of its tokens, by their places; known values are not computed again."""
        values = {
            node: value if has_all_rows(node) else value[places] for node, value in self._values.items()
        }
        return Evaluation(self.scene, self._stages, tokens=self.tokens[places], values=values)

    def everywhere(self) -> Evaluation:
        """Return this layer with all B·S tokens, padding too."""
        if self._everywhere is None:
            everything = torch.arange(self.scene.attention_mask.numel())
            values = {node: value for node, value in self._values.items() if has_all_rows(node)}
            self._everywhere = Evaluation(self.scene, self._stages, tokens=everything, values=values)
        return self._everywhere

    def chosen(self, rows: torch.Tensor) -> torch.Tensor:
        """Pick the chosen tokens of [B,S,F]: [T,F]."""
        return choose_rows(self, rows)

    def rows(self, site: Site) -> torch.Tensor:
        """Return the chosen tokens of any site: [T,F]."""
        value = self[site]
        return self.chosen(token_rows(value, site)) if has_all_rows(site) else value

    def expert_job(self) -> ExpertJob:
        """Return this evaluation's request to the experts."""
        return ExpertJob(
            states=self[ExpertValue.EXPERT_INPUT],
            experts=self[ExpertValue.EXPERT_NUMBERS],
            shares=self[Site.ROUTER_WEIGHTS],
            recipe=self.recipe,
        )


def _moe_delta(at: Evaluation) -> torch.Tensor:
    return (at[ExpertValue.EXPERT_OUTPUTS] * at[Site.ROUTER_WEIGHTS][..., None]).sum(1)


STAGES: Mapping[GraphNode, Stage] = MappingProxyType(
    {
        **{site: stage for site, stage in float32_stages.STAGES.items()},  # noqa: C416 - wider keys
        ExpertValue.EXPERT_INPUT: lambda at: at[Site.POST_NORM],
        ExpertValue.EXPERT_NUMBERS: lambda at: at[Site.ROUTER_EXPERTS],
        ExpertValue.EXPERT_OUTPUTS: lambda at: run_experts(at.weights, [at.expert_job()])[0],
        Site.MOE_DELTA: _moe_delta,
    }
)


def scaled(site: Site, factor: float) -> Change:
    """Build the change that multiplies a site by a factor."""
    return Change(stages={site: lambda at: factor * STAGES[site](at)})


def with_given(
    stages: Mapping[GraphNode, Stage], given: Mapping[Site, torch.Tensor]
) -> dict[GraphNode, Stage]:
    """Replace the stages of `given` sites by their values [B,S,…]."""
    replaced: dict[GraphNode, Stage] = {
        site: _constant(value) if has_all_rows(site) else _chosen(value) for site, value in given.items()
    }
    return {**stages, **replaced}


def _chosen(value: torch.Tensor) -> Stage:
    return lambda at: at.chosen(value)


def _constant(value: torch.Tensor) -> Stage:
    return lambda _: value


def _downstream(nodes: frozenset[GraphNode]) -> frozenset[GraphNode]:
    reached, size = set(nodes), 0
    while len(reached) > size:
        size = len(reached)
        reached |= {node for node, inputs in NODE_INPUTS.items() if reached.intersection(inputs)}
    return frozenset(reached)
