"""Formulas: what a model computes at each site, in words, as its graph has it.

N heads, K kv heads, D head_dim, H hidden, B batch, S sequence; eps is rms_norm_eps.
"""

from __future__ import annotations

from minimax_tools.model.graph import ModelGraph, QkNorm
from minimax_tools.model.sites import ModelSite, Site


def formula(site: Site | ModelSite, graph: ModelGraph) -> str:
    """Return what the original computes at a site, in words."""
    queries, keys = ("q_norm", "k_norm") if graph.has_qk_norm else ("q_proj", "k_proj")
    formulas: dict[Site | ModelSite, str] = {
        ModelSite.EMBEDDING: "the rows of embed_tokens.weight at the token ids, not scaled",
        Site.INPUT: "the output of the layer before; in layer 0 the embedding",
        Site.INPUT_NORM: _norm(graph, "input", "input_layernorm", "all H channels"),
        Site.Q_PROJ: _projection(graph, "q_proj", "N"),
        Site.K_PROJ: _projection(graph, "k_proj", "K"),
        Site.V_PROJ: _projection(graph, "v_proj", "K"),
        Site.Q_NORM: _qk_norm(graph, "q", "N"),
        Site.K_NORM: _qk_norm(graph, "k", "K"),
        Site.Q_ROPE: _rope(queries),
        Site.K_ROPE: _rope(keys),
        Site.ATTN_CONTEXT: (
            "keys and values repeated for N/K neighbouring heads, scores q·k · D^-0.5, causal and padding mask, "
            "softmax in float32, sum over values; then [B,N,S,D] transposed to [B,S,N·D], heads side by side"
        ),
        Site.ATTN_DELTA: _product("attn_context", "o_proj", ", summed over all heads", graph.has_output_bias),
        Site.ATTN_RESIDUAL: "input + attn_delta",
        Site.POST_NORM: _norm(graph, "attn_residual", "post_attention_layernorm", "all H channels"),
        Site.ROUTER_LOGITS: _product("post_norm", "gate", ", in float32" if graph.has_float32_router else ""),
        Site.ROUTER_EXPERTS: _experts(graph),
        Site.ROUTER_WEIGHTS: _shares(graph),
        Site.ROUTED_DELTA: _routed_sum(graph),
        Site.SHARED_DELTA: f"shared_experts: {_mlp(graph, 'down_proj', 'gate_proj', 'up_proj')}",
        Site.MOE_DELTA: _moe_sum(graph),
        Site.MLP_DELTA: _mlp(graph, "down_proj", "gate_proj", "up_proj"),
        Site.OUTPUT: "attn_residual + moe_delta" + (", or + mlp_delta" if graph.dense_layers else ""),
        ModelSite.FINAL_NORM: _norm(graph, "the last layer's output", "norm", "all H channels"),
        ModelSite.LOGITS: _product("final_norm", "lm_head"),
    }
    return formulas[site]


def _norm(graph: ModelGraph, source: str, weight: str, channels: str) -> str:
    gain = f"(1 + {weight}.weight)" if graph.has_gain_of_one_plus else f"{weight}.weight"
    return f"{source} · rsqrt(mean({source}²) + eps) · {gain}, one mean over {channels}, in float32"


def _qk_norm(graph: ModelGraph, kind: str, heads: str) -> str:
    is_per_head = graph.qk_norm is QkNorm.PER_HEAD
    channels = "the D channels of each head" if is_per_head else f"all {heads}·D channels of a token"
    return _norm(graph, f"{kind}_proj", f"{kind}_norm", channels)


def _product(source: str, weight: str, further: str = "", has_bias: bool = False) -> str:
    bias = f" + {weight}.bias" if has_bias else ", without a bias"
    return f"{source} @ {weight}.weightᵀ{bias}{further}"


def _projection(graph: ModelGraph, weight: str, heads: str) -> str:
    return _product("input_norm", weight, f": {heads} heads of D dims side by side", graph.has_qkv_bias)


def _rope(source: str) -> str:
    return (
        f"heads of {source} as [B,heads,S,D]; of the first rotary_dim dims, i and i + rotary_dim/2 are turned by "
        "position · rope_theta^(-2i/rotary_dim), cos and sin in float32; the other dims stay"
    )


def _experts(graph: ModelGraph) -> str:
    bias = " + e_score_correction_bias" if graph.has_correction_bias else ""
    return f"the k largest of {graph.router_scores}(router_logits){bias}, in float32"


def _shares(graph: ModelGraph) -> str:
    return ", ".join(
        (
            f"{graph.router_scores}(router_logits) of the chosen experts",
            *(("without the bias",) if graph.has_correction_bias else ()),
            "divided by their sum" if graph.normalises_shares else "not divided by their sum",
            *((f"times {graph.share_scale:g}",) if graph.share_scale != 1 else ()),
            "in float32" if graph.has_float32_shares else "in float32, then rounded to the model's dtype",
        )
    )


def _mlp(graph: ModelGraph, down: str, gate: str, up: str) -> str:
    if graph.swiglu_alpha is None:
        return f"{down}(silu({gate}(post_norm)) · {up}(post_norm))"
    limit = f"{graph.swiglu_limit:g}"
    return (
        f"{down}(g · sigmoid({graph.swiglu_alpha:g} · g) · (u + 1)), g = {gate}(post_norm) up to {limit}, "
        f"u = {up}(post_norm) from -{limit} to {limit}"
    )


def _routed_sum(graph: ModelGraph) -> str:
    text = f"sum over the chosen experts of router_weight · {_mlp(graph, 'w2', 'w1', 'w3')}"
    return f"{text}, not clamped" if graph.swiglu_alpha is None else text


def _moe_sum(graph: ModelGraph) -> str:
    if not graph.has_shared_experts:
        return _routed_sum(graph)
    return f"{f'{graph.sum_scale:g} · ' if graph.has_sum_scale else ''}routed_delta + shared_delta"
