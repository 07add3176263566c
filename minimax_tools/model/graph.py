"""ModelGraph: what the decoder layers of a model compute, as options in which families differ.

N heads, K kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any

from minimax_tools.model.sites import DENSE_SITES, EXPERT_SITES, SITE_LEVELS, Site
from minimax_tools.text_enum import TextEnum


class QkNorm(TextEnum):
    """The channels that the norms of queries and keys take one mean over."""

    ALL_HEADS = "all heads"  # all channels of a token: weights are [N·D] and [K·D]
    PER_HEAD = "per head"  # the channels of one head: both weights are [D]
    NONE = "none"  # queries and keys are not normed


class RouterScores(TextEnum):
    """The function that makes scores of the router's logits."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"  # over all experts


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparsity:
    """An indexer that chooses blocks of keys for each query; queries with few keys see all of them."""

    num_heads: int
    head_dim: int
    block_size: int  # keys of a block
    num_blocks: int  # blocks that a query sees, its own included

    @property
    def num_keys(self) -> int:
        """The number of keys up to which a query sees all."""
        return self.block_size * self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """The options of a graph; the defaults are MiniMax-M2's."""

    # Norms
    qk_norm: QkNorm = QkNorm.ALL_HEADS
    has_gain_of_one_plus: bool = False  # whether every norm multiplies by 1 + weight, rounded once behind it
    # Attention
    has_qkv_bias: bool = False  # whether q_proj, k_proj and v_proj add a bias
    has_output_bias: bool = False  # whether o_proj adds one
    # The router
    router_scores: RouterScores = RouterScores.SIGMOID
    # Whether gate, correction bias and logits are float32 in a BF16 model. Else scores alone are.
    has_float32_router: bool = True
    has_float32_shares: bool = True  # whether routing weights are float32 too
    has_correction_bias: bool = True  # whether a bias is added to the scores for the choice of experts
    normalises_shares: bool = True  # whether the weights of the chosen experts are divided by their sum
    share_scale: float = 1.0  # factor on the routing weights, behind their division
    # Experts
    sum_scale: float = 1.0  # factor on the sum of the routed experts
    shared_width: int = 0  # width of the shared expert, which every token takes; 0 for none
    # SwiGLU-OAI: the gate is clamped at the limit, up at both signs of it, and the product is
    # gate · sigmoid(alpha · gate) · (up + 1); None for silu(gate) · up.
    swiglu_alpha: float | None = None
    swiglu_limit: float = 0.0
    # Layers whose experts are one dense MLP
    dense_layers: tuple[int, ...] = ()
    dense_width: int = 0  # width of that MLP
    # Layers whose attention is sparse, and how
    sparse_layers: tuple[int, ...] = ()
    sparsity: BlockSparsity | None = None

    def has(self, options: Mapping[str, object]) -> bool:
        """Decide whether options, or the properties below, have these values; by name."""
        return all(getattr(self, name) == value for name, value in options.items())

    @property
    def has_qk_norm(self) -> bool:
        """True if queries and keys are normed."""
        return self.qk_norm is not QkNorm.NONE

    @property
    def has_shared_experts(self) -> bool:
        """True if every token takes shared experts beside the routed ones."""
        return bool(self.shared_width)

    @property
    def has_mlps(self) -> bool:
        """True if some layer has an MLP that every token takes: shared experts, or that of a dense layer."""
        return self.has_shared_experts or bool(self.dense_layers)

    @property
    def has_sum_scale(self) -> bool:
        """True if the routed experts' sum is multiplied by a factor."""
        return self.sum_scale != 1

    @property
    def has_swiglu_oai(self) -> bool:
        """True if experts combine gate and up by SwiGLU-OAI."""
        return self.swiglu_alpha is not None

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that some layer has, in execution order."""
        kinds = {LayerGraph(self, is_dense=is_dense) for is_dense in (False, bool(self.dense_layers))}
        held = {site for kind in kinds for site in kind.sites}
        return tuple(site for site in Site if site in held)

    def level(self, name: str) -> tuple[Site, ...]:
        """Return the sites that `--sites` keeps under a name."""
        return tuple(site for site in SITE_LEVELS[name] if site in self.sites)

    def layer(self, layer: int) -> LayerGraph:
        """Return the graph of a layer."""
        return LayerGraph(self, is_dense=layer in self.dense_layers, is_sparse=layer in self.sparse_layers)

    def unrotated(self, rotated: Site) -> Site:
        """Return the site whose heads RoPE rotates into q_rope or k_rope."""
        (source,) = LayerGraph(self).inputs[rotated]
        return source

    @property
    def most_keys(self) -> int | None:
        """The longest row in which sparse attention hides nothing; None if no layer is sparse.

        Such layers count blocks by positions, and are defined for rows that begin at position 0.
        """
        return self.sparsity.num_keys if self.sparse_layers and self.sparsity else None

    @property
    def ranks_logits(self) -> bool:
        """True if the order of the logits alone chooses the experts."""
        return self.router_scores is RouterScores.SOFTMAX and not self.has_correction_bias

    def other_options(self) -> dict[str, Any]:
        """Return the options that are not MiniMax-M2's, as JSON values by name."""
        return {
            option.name: _as_json(value)
            for option in fields(self)
            if (value := getattr(self, option.name)) != option.default
        }


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The data flow of one layer: its sites, and what each is computed from."""

    model: ModelGraph
    is_dense: bool = False  # whether it has one MLP in place of experts
    is_sparse: bool = False  # whether an indexer chooses what its attention sees

    @property
    def routed_sum(self) -> Site:
        """The site of the routed experts' sum."""
        return Site.ROUTED_DELTA if self.model.has_shared_experts else Site.MOE_DELTA

    @property
    def last_delta(self) -> Site:
        """The site that is added to the residual stream last."""
        return Site.MLP_DELTA if self.is_dense else Site.MOE_DELTA

    @property
    def sites(self) -> tuple[Site, ...]:
        """The layer's sites, in execution order."""
        return tuple(self.inputs)

    @property
    def inputs(self) -> Mapping[Site, tuple[Site, ...]]:
        """The sites that each site is computed from. The search for a fault follows it."""
        return _site_inputs(self)


@cache
def _site_inputs(graph: LayerGraph) -> Mapping[Site, tuple[Site, ...]]:
    is_normed = graph.model.has_qk_norm
    inputs: dict[Site, tuple[Site, ...]] = {
        Site.INPUT: (),
        Site.INPUT_NORM: (Site.INPUT,),
        Site.Q_PROJ: (Site.INPUT_NORM,),
        Site.K_PROJ: (Site.INPUT_NORM,),
        Site.V_PROJ: (Site.INPUT_NORM,),
        Site.Q_NORM: (Site.Q_PROJ,),
        Site.K_NORM: (Site.K_PROJ,),
        Site.Q_ROPE: (Site.Q_NORM if is_normed else Site.Q_PROJ,),
        Site.K_ROPE: (Site.K_NORM if is_normed else Site.K_PROJ,),
        Site.ATTN_CONTEXT: (Site.Q_ROPE, Site.K_ROPE, Site.V_PROJ),
        Site.ATTN_DELTA: (Site.ATTN_CONTEXT,),
        Site.ATTN_RESIDUAL: (Site.INPUT, Site.ATTN_DELTA),
        Site.POST_NORM: (Site.ATTN_RESIDUAL,),
        Site.ROUTER_LOGITS: (Site.POST_NORM,),
        Site.ROUTER_EXPERTS: (Site.ROUTER_LOGITS,),
        Site.ROUTER_WEIGHTS: (Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS),
        Site.ROUTED_DELTA: (Site.POST_NORM, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS),
        Site.SHARED_DELTA: (Site.POST_NORM,),
        Site.MOE_DELTA: (Site.ROUTED_DELTA, Site.SHARED_DELTA),
        Site.MLP_DELTA: (Site.POST_NORM,),
        Site.OUTPUT: (Site.ATTN_RESIDUAL, Site.MLP_DELTA if graph.is_dense else Site.MOE_DELTA),
    }
    absent = set(EXPERT_SITES if graph.is_dense else DENSE_SITES)
    if not is_normed:
        absent |= {Site.Q_NORM, Site.K_NORM}
    if not graph.model.has_shared_experts:
        # The routed sum is then all that a mixture of experts computes.
        inputs[Site.MOE_DELTA] = inputs[Site.ROUTED_DELTA]
        absent |= {Site.ROUTED_DELTA, Site.SHARED_DELTA}
    return MappingProxyType({site: sources for site, sources in inputs.items() if site not in absent})


def _as_json(value: Any) -> Any:
    if isinstance(value, TextEnum):
        return str(value)
    if isinstance(value, BlockSparsity):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value
