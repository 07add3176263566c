"""Sites: the named points at which tensors of a layer, or of the model around the layers, are compared.

B batch, S sequence, H hidden, N heads, K kv heads, D head_dim, E experts, k experts per token; eps is rms_norm_eps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from minimax_tools.errors import UsageError, did_you_mean
from minimax_tools.text_enum import TextEnum


class Site(TextEnum):
    """A point of a decoder layer, in execution order; the value is its name in files and reports."""

    INPUT = "input"  # [B,S,H]
    INPUT_NORM = "input_norm"  # [B,S,H]
    Q_PROJ = "q_proj"  # [B,S,N·D]
    K_PROJ = "k_proj"  # [B,S,K·D]
    V_PROJ = "v_proj"  # [B,S,K·D]
    Q_NORM = "q_norm"  # [B,S,N·D]
    K_NORM = "k_norm"  # [B,S,K·D]
    Q_ROPE = "q_rope"  # [B,N,S,D]
    K_ROPE = "k_rope"  # [B,K,S,D]
    ATTN_CONTEXT = "attn_context"  # [B,S,N·D], o_proj's input
    ATTN_DELTA = "attn_delta"  # [B,S,H], o_proj's output
    ATTN_RESIDUAL = "attn_residual"  # [B,S,H]
    POST_NORM = "post_norm"  # [B,S,H]
    ROUTER_LOGITS = "router_logits"  # [B,S,E]
    ROUTER_EXPERTS = "router_experts"  # [B,S,k], a set: its order is free
    ROUTER_WEIGHTS = "router_weights"  # [B,S,k], in the order of router_experts
    ROUTED_DELTA = "routed_delta"  # [B,S,H], the routed experts' sum, where there are shared experts too
    SHARED_DELTA = "shared_delta"  # [B,S,H], what the shared experts add to it
    MOE_DELTA = "moe_delta"  # [B,S,H], before the residual add
    MLP_DELTA = "mlp_delta"  # [B,S,H], of a dense layer in place of moe_delta
    OUTPUT = "output"  # [B,S,H]

    @property
    def order(self) -> int:
        """Position in execution order."""
        return _ORDER[self]

    @property
    def has_heads_dim(self) -> bool:
        """True if the tensor is [B, heads, S, D] rather than [B, S, …]."""
        return self in (Site.Q_ROPE, Site.K_ROPE)


class ModelSite(TextEnum):
    """A point of the model outside its layers."""

    EMBEDDING = "embedding"  # [B,S,H]
    FINAL_NORM = "final_norm"  # [B,S,H]
    LOGITS = "logits"  # [B,S,vocab]

    @property
    def has_heads_dim(self) -> bool:
        """False: no site of the model has heads."""
        return False


_ORDER: Mapping[Site, int] = MappingProxyType({site: order for order, site in enumerate(Site)})

# Operations that compute two sites side by side: a mistake in one of them shows at both.
SHARED_OPERATIONS: Mapping[str, tuple[Site, Site]] = MappingProxyType(
    {
        "norm of queries and keys": (Site.Q_NORM, Site.K_NORM),
        "rotary embedding": (Site.Q_ROPE, Site.K_ROPE),
    }
)

# The sites to keep, by the name that --sites takes, as far as a graph has them.
SITE_LEVELS: Mapping[str, tuple[Site, ...]] = MappingProxyType(
    {
        "layer": (Site.INPUT, Site.OUTPUT),
        "component": (
            Site.INPUT,
            Site.ATTN_DELTA,
            Site.ATTN_RESIDUAL,
            Site.POST_NORM,
            Site.ROUTER_LOGITS,
            Site.ROUTER_EXPERTS,
            Site.ROUTER_WEIGHTS,
            Site.ROUTED_DELTA,
            Site.SHARED_DELTA,
            Site.MOE_DELTA,
            Site.MLP_DELTA,
            Site.OUTPUT,
        ),
        "all": tuple(Site),
    }
)
# Sites of a mixture of experts, and of a dense layer in their place.
EXPERT_SITES = (
    *(Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS),
    *(Site.ROUTED_DELTA, Site.SHARED_DELTA, Site.MOE_DELTA),
)
DENSE_SITES = (Site.MLP_DELTA,)
# Sites that what the routed experts compute goes into.
BEHIND_EXPERTS = (Site.ROUTED_DELTA, Site.MOE_DELTA, Site.OUTPUT)
# Sites that some graphs lack.
_OPTIONAL = frozenset((Site.Q_NORM, Site.K_NORM, *EXPERT_SITES, *DENSE_SITES))


def find_level(sites: Sequence[str]) -> str | None:
    """Find the name of the sites that a run keeps, of any graph; None if they are no level's."""
    for name, level in SITE_LEVELS.items():
        if set(level) - _OPTIONAL <= set(sites) <= set(level):
            return name
    return None


def parse_site(name: str) -> Site:
    """Parse the name of a site; raise UsageError if no site has it."""
    try:
        return Site(name)
    except ValueError:
        raise UsageError(
            f"{name!r} is no site of a decoder layer",
            expected="one of " + ", ".join(Site),
            next_step=did_you_mean(name, Site) or None,
        ) from None
