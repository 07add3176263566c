"""The sites of a layer on NxDI: submodules that show them, and values that NxD shows in another form.

| site | NxD's form | shown by |
|---|---|---|
| `router_weights` | affinities of all experts, and the chosen experts | `ChosenWeights` |
| `q_norm`, `k_norm` by `q_layernorm`, `k_layernorm` | one norm for each head | `ShownHeads` |

Such a module is called by a hook on one of the layer's, with the value in mm2's form. A value that replaces it there is
brought back to NxD's form.
B batch, S tokens, T tokens of all rows, N heads, D head_dim, E experts, k experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minimax_tools.model.site_layouts import Sharded
from minimax_tools.model.sites import Site
from neuron.ports.nxdi_layout import NxdiLayout

# Path of the port's layer in an `NxdiLayer`.
LAYER = "layer"
_ATTENTION = f"{LAYER}.self_attn"
_QKV = f"{_ATTENTION}.qkv_proj"
_INPUT_NORM, _POST_NORM = f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"
_MOE_NAMES = ("block_sparse_moe", "mlp", "moe", "feed_forward")
_HEAD_NORMS = {Site.Q_NORM: "q_layernorm", Site.K_NORM: "k_layernorm"}


class ChosenWeights(nn.Module):
    """The weights [T,k] of the chosen experts: their affinities, divided by their sum if the port normalises them.

    NxD's experts get the affinities [T,E] of all experts, and divide those of the chosen ones [T,k] themselves.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        routed = getattr(experts, "routed_experts_mlp_config", None)
        self._normalises = bool(getattr(routed, "normalize_top_k_affinities", True))
        experts.register_forward_pre_hook(self._show, with_kwargs=True)

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the weights."""
        return weights

    def _show(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        affinities, chosen = kwargs.get("expert_affinities"), kwargs.get("expert_index")
        if not (isinstance(affinities, torch.Tensor) and isinstance(chosen, torch.Tensor)):
            return None
        chosen = chosen.to(torch.int64)
        weights = affinities.gather(-1, chosen).to(torch.float32)
        if self._normalises:
            # They are no finer than the affinities.
            weights = (weights / weights.sum(dim=-1, keepdim=True)).to(affinities.dtype).to(torch.float32)
        shown = self(weights)
        if shown is weights:
            return None
        replaced = affinities.scatter(-1, chosen, shown.to(affinities.dtype))
        return args, {**kwargs, "expert_affinities": replaced}


class ShownHeads(nn.Module):
    """The output [B,S,N·D] of a norm that is called with heads, [B,S,N,D] or [B,N,S,D]."""

    def __init__(self, norm: nn.Module, *, is_transposed: bool) -> None:
        super().__init__()
        self._is_transposed = is_transposed  # whether heads come before tokens
        norm.register_forward_hook(self._show)

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the norm's output."""
        return normed

    def _show(self, _: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return None
        if output.ndim != 4:
            self(output)
            return None
        by_token = output.transpose(1, 2) if self._is_transposed else output
        flat = by_token.flatten(2)
        shown = self(flat)
        if shown is flat:
            return None
        heads = shown.unflatten(2, by_token.shape[2:])
        return heads.transpose(1, 2) if self._is_transposed else heads


def find_sites(module: nn.Module, layout: NxdiLayout) -> dict[str, str]:
    """Return the paths of the sites: the `sites` of the port's class, else submodules that layers on NxDI have.

    `module` holds the port's layer as `layer`, and gets the modules that show what NxD holds in another form. Rotated
    queries and keys are not shown.
    """
    layer = module.get_submodule(LAYER)
    declared = getattr(layer, "sites", None)
    if declared is not None:
        return {site: f"{LAYER}.{path}" for site, path in declared.items()}
    present = dict(module.named_modules())
    # Without a mixture of experts of a known name, any name will do: sites below it are dropped at the end.
    moe = next((name for name in _MOE_NAMES if f"{LAYER}.{name}" in present), _MOE_NAMES[0])
    queries = Sharded(dim=-1, blocks=layout.heads.all_query_heads())
    keys = Sharded(dim=-1, blocks=layout.heads.all_kv_heads())
    # A submodule's path, then perhaps `:` and a point, then perhaps a layout, which begins with `@`.
    candidates = {
        Site.INPUT_NORM: _INPUT_NORM,
        Site.Q_PROJ: f"{_QKV}.q_proj{queries}",
        **{site: f"{_QKV}.{site}{keys}" for site in (Site.K_PROJ, Site.V_PROJ)},
        Site.Q_NORM: f"{_ATTENTION}.q_norm{queries}",
        Site.K_NORM: f"{_ATTENTION}.k_norm{keys}",
        Site.ATTN_CONTEXT: f"{_ATTENTION}.o_proj:input{queries}",
        Site.ATTN_DELTA: f"{_ATTENTION}.o_proj",
        Site.ATTN_RESIDUAL: f"{_POST_NORM}:input",
        Site.POST_NORM: _POST_NORM,
        # NxD's router returns logits, affinities and the chosen experts.
        Site.ROUTER_LOGITS: f"{LAYER}.{moe}.router:output[0]",
        Site.ROUTER_EXPERTS: f"{LAYER}.{moe}.router:output[2]",
        Site.MOE_DELTA: f"{LAYER}.{moe}",
    }
    paths = {site: text.partition("@")[0].partition(":")[0] for site, text in candidates.items()}
    found = {site: text for site, text in candidates.items() if paths[site] in present}
    for site, name in _HEAD_NORMS.items():
        norm = present.get(f"{_ATTENTION}.{name}")
        if norm is not None and site not in found:
            is_transposed = bool(getattr(present[_ATTENTION], "post_transpose_layernorm", False))
            module.add_module(f"shown_{site}", ShownHeads(norm, is_transposed=is_transposed))
            found[site] = f"shown_{site}{queries if site is Site.Q_NORM else keys}"
    experts = present.get(f"{LAYER}.{moe}.expert_mlps")
    if experts is not None:
        module.add_module(f"shown_{Site.ROUTER_WEIGHTS}", ChosenWeights(experts))
        found[Site.ROUTER_WEIGHTS] = f"shown_{Site.ROUTER_WEIGHTS}"
    return {str(site): text for site, text in found.items()}
