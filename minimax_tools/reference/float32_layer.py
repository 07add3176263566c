"""Float32Layer: mm2's own decoder layer in float32, which computes one site or all of them.

Goldens and ports are held against it. Experts run one at a time, and only those that tokens are routed to.
B batch, S sequence, T tokens (B·S), H hidden, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, expert_weight
from minimax_tools.reference.float32_stages import STAGES, has_all_tokens, swiglu


class Float32Layer:
    """A decoder layer in float32.

    Args:
        spec: The model.
        tensors: The layer's weights by the hub's relative names. Each is read and upcast when it is needed; only
            experts' weights are read again for each use.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self._spec = spec
        self._tensors = tensors
        self._kept: dict[str, torch.Tensor] = {}

    def run(
        self, hidden_states: torch.Tensor, inputs: Inputs, *, router_experts: torch.Tensor | None
    ) -> dict[Site, torch.Tensor]:
        """Compute every site but the input, float32 on the CPU; no expert runs for padding.

        Args:
            hidden_states: The layer's input [B,S,H].
            inputs: The batch, for its mask and positions.
            router_experts: int64 [B,S,k], the choice to replay; None for the layer's own. `router_experts` of the
                result is always the layer's own.
        """
        # Later sites are computed from the replayed choice; `sites` keeps the layer's own.
        replayed = {} if router_experts is None else {Site.ROUTER_EXPERTS: router_experts.long()}
        sites = {Site.INPUT: hidden_states.float()}
        for site in Site:
            if site is not Site.INPUT:
                sites[site] = self.compute(site, {**sites, **replayed}, inputs)
        del sites[Site.INPUT]
        return sites

    def compute(self, site: Site, values: Mapping[Site, torch.Tensor], inputs: Inputs) -> torch.Tensor:
        """Compute one site, float32 on the CPU (experts int64), from other sites.

        Args:
            site: Any site but the input.
            values: At least the sites in `SITE_INPUTS[site]`, float32 (experts int64), in the shapes that `Site` gives.
            inputs: The batch, for its mask and positions.
        """
        layer = _Values(spec=self._spec, tensors=self._tensors, kept=self._kept, inputs=inputs, given=values)
        with torch.no_grad():
            value = layer.run_experts() if site is Site.MOE_DELTA else STAGES[site](layer)
        return value if has_all_tokens(site) else value.unflatten(0, inputs.batch_shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Values:
    """Given sites of all tokens of a batch, padding included: the `LayerValues` that stages read.

    Stages take and give sites from `attn_context` on with one row for each token: [T,…] instead of [B,S,…].
    """

    spec: ModelSpec
    tensors: Mapping[str, torch.Tensor]
    kept: dict[str, torch.Tensor]  # weights that were upcast for earlier sites
    inputs: Inputs
    given: Mapping[Site, torch.Tensor]
    tokens: torch.Tensor = field(init=False)  # indices of the tokens in the flattened batch: here all of them

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", torch.arange(self.inputs.attention_mask.numel()))

    @property
    def attention_mask(self) -> torch.Tensor:
        return self.inputs.attention_mask

    @property
    def position_ids(self) -> torch.Tensor:
        return self.inputs.position_ids

    # Nothing is decoded here: `decode_start` is behind the last column, and `base`, which fills the cache, is itself.
    @property
    def decode_start(self) -> int:
        return self.inputs.attention_mask.shape[1]

    @property
    def base(self) -> _Values:
        return self

    def __getitem__(self, site: Site) -> torch.Tensor:
        value = self.given[site]
        return value if has_all_tokens(site) else value.flatten(0, 1)

    def weight(self, name: str) -> torch.Tensor:
        if name not in self.kept:
            self.kept[name] = self.tensors[name].float()
        return self.kept[name]

    def run_experts(self) -> torch.Tensor:
        """Run the experts of real tokens one after the other, and sum their outputs: [T,H], 0 on padding."""
        is_real = self.attention_mask.flatten().bool()
        states = self[Site.POST_NORM][is_real]
        experts, shares = self[Site.ROUTER_EXPERTS][is_real], self[Site.ROUTER_WEIGHTS][is_real]
        total = torch.zeros_like(states)
        for number in experts.unique().tolist():
            tokens, slots = torch.where(experts == number)
            gate, up, down = (
                self.tensors[expert_weight(number, name)].float()
                for name in (EXPERT_GATE, EXPERT_UP, EXPERT_DOWN)
            )
            output = swiglu(states[tokens] @ gate.T, states[tokens] @ up.T) @ down.T
            total.index_add_(0, tokens, output * shares[tokens, slots, None])
        delta = torch.zeros_like(self[Site.POST_NORM])
        delta[is_real] = total
        return delta
