"""Formulas: the computation of each site from its inputs in the original model, in a line.

N heads, K kv heads, D head_dim, H hidden, k experts per token; eps is rms_norm_eps.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from minimax_tools.model.sites import ModelSite, Site


def _norm(source: str, weight: str, channels: str) -> str:
    return f"{source} · rsqrt(mean({source}²) + eps) · {weight}.weight, one mean over {channels}, in float32"


def _product(source: str, weight: str, further: str = "") -> str:
    return f"{source} @ {weight}.weightᵀ, without a bias{further}"


def _rope(source: str) -> str:
    return (
        f"heads of {source} as [B,heads,S,D]; of the first rotary_dim dims, i and i + rotary_dim/2 are turned by "
        "position · rope_theta^(-2i/rotary_dim), cos and sin in float32; the other dims stay"
    )


FORMULAS: Mapping[Site | ModelSite, str] = MappingProxyType(
    {
        ModelSite.EMBEDDING: "the rows of embed_tokens.weight at the token ids, not scaled",
        Site.INPUT: "the output of the layer before; in layer 0 the embedding",
        Site.INPUT_NORM: _norm("input", "input_layernorm", "all H channels"),
        Site.Q_PROJ: _product("input_norm", "q_proj", ": N heads of D dims side by side"),
        Site.K_PROJ: _product("input_norm", "k_proj", ": K heads of D dims side by side"),
        Site.V_PROJ: _product("input_norm", "v_proj", ": K heads of D dims side by side"),
        Site.Q_NORM: _norm("q_proj", "q_norm", "all N·D channels of a token"),
        Site.K_NORM: _norm("k_proj", "k_norm", "all K·D channels of a token"),
        Site.Q_ROPE: _rope("q_norm"),
        Site.K_ROPE: _rope("k_norm"),
        Site.ATTN_CONTEXT: (
            "keys and values repeated for N/K neighbouring heads, scores q·k · D^-0.5, causal and padding mask, "
            "softmax in float32, sum over values; then [B,N,S,D] transposed to [B,S,N·D], heads side by side"
        ),
        Site.ATTN_DELTA: _product("attn_context", "o_proj", ", summed over all heads"),
        Site.ATTN_RESIDUAL: "input + attn_delta",
        Site.POST_NORM: _norm("attn_residual", "post_attention_layernorm", "all H channels"),
        Site.ROUTER_LOGITS: _product("post_norm", "gate", ", in float32"),
        Site.ROUTER_EXPERTS: "the k largest of sigmoid(router_logits) + e_score_correction_bias, in float32",
        Site.ROUTER_WEIGHTS: (
            "sigmoid(router_logits) of the chosen experts, without the bias, divided by their sum, in float32"
        ),
        Site.MOE_DELTA: (
            "sum over the chosen experts of router_weight · w2(silu(w1(post_norm)) · w3(post_norm)), not clamped"
        ),
        Site.OUTPUT: "attn_residual + moe_delta",
        ModelSite.FINAL_NORM: _norm("the last layer's output", "norm", "all H channels"),
        ModelSite.LOGITS: _product("final_norm", "lm_head"),
    }
)
