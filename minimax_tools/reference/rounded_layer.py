"""RoundedLayer: copies of a decoder layer computed side by side in float32, each with its own kind of rounding.

An exact copy is the layer's true value. The others are samples of the noise that BF16 adds to a correct layer: one kind
is rounded to the nearest BF16 number, the other moved at random by up to half a BF16 step. They round wherever any
correct implementation does; a float32 router is float32 in every one, and never rounded. A golden computes
them as the variants `nearest`, `random_1`, `random_2` … of its own prompts: a port may be as far from the float32 twin
as the farthest variant, at each site and token.
B batch, S sequence, R rows of all copies (copies · B), H hidden, N heads, K kv heads, D head_dim, E experts,
k experts per token. The end of a name such as `hidden_rsh` gives its dims: [R,S,H].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

from minimax_tools.model import weight_names
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.router import Router
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import DENSE_MLP, SHARED_MLP, MlpNames, bias_name
from minimax_tools.reference.float32_stages import split_heads
from minimax_tools.reference.rounding import RoundedRows, Rounding, RoundingKind, rounded_rows
from minimax_tools.reference.upcast import ExpertRounding, Scratch, run_rounded, upcast_experts
from minimax_tools.reference.variant_names import NEAREST

# Attention scores of one row that are held at a time, 16 MB in float32, but at least one head. Another number gives
# other random steps too (see `_Pass`).
_MOST_SCORES = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class RoundedLayer:
    """A decoder layer, computed in several copies."""

    spec: ModelSpec
    # The layer's weights by the hub's relative names, of any float dtype. Each is read when it is needed.
    tensors: Mapping[str, torch.Tensor]
    kinds: tuple[RoundingKind, ...] = field(kw_only=True)  # of each copy, ascending, as `Rounding` demands
    seed: int = field(kw_only=True)  # of the random steps

    def run(
        self, hidden_states: torch.Tensor, inputs: Inputs, *, router_experts: torch.Tensor | None
    ) -> tuple[dict[Site, torch.Tensor], ...]:
        """Compute every site but the input [B,S,H], for each copy, float32; no expert runs for padding.

        `router_experts`, int64 [B,S,k], is the choice that all copies replay; None for the choice of the first copy
        that rounds to nearest, or else of the first copy. The site `router_experts` has each copy's own choice;
        `router_weights` has the weights of the replayed choice, in its order.
        """
        with torch.no_grad():
            copies_rsh = hidden_states.float().repeat(len(self.kinds), 1, 1)
            sites = _Pass(self, inputs).run(copies_rsh, lambda biased: self._share(biased, router_experts))
        num_copies = len(self.kinds)
        chunks = {site: tensor.chunk(num_copies) for site, tensor in sites.items()}
        return tuple(
            {site: copies[number] for site, copies in chunks.items()} for number in range(num_copies)
        )

    def run_apart(
        self, hidden_rsh: torch.Tensor, inputs: Inputs, *, choose: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Compute the output [R,S,H] of each copy from its own input, float32, so that copies can be chained.

        `choose` gets the biased scores [R,S,E] of all copies, and returns the experts [R,S,k] that run.
        """
        with torch.no_grad():
            return _Pass(self, inputs).run(hidden_rsh, choose)[Site.OUTPUT]

    def _share(self, biased_rse: torch.Tensor, router_experts: torch.Tensor | None) -> torch.Tensor:
        """Return the choice [R,S,k] that all copies replay (see `run`), given the biased scores of each."""
        if router_experts is None:
            leading_copy = self.kinds.index(RoundingKind.NEAREST) if RoundingKind.NEAREST in self.kinds else 0
            leading_scores = biased_rse.chunk(len(self.kinds))[leading_copy]
            router_experts = leading_scores.topk(self.spec.num_experts_per_tok, dim=-1).indices
        return router_experts.long().to(biased_rse.device).repeat(len(self.kinds), 1, 1)


@dataclass(slots=True)
class _Pass:
    """A computation of all copies. Roundings are numbered (`draws`) as they are called: another order, other noise."""

    layer: RoundedLayer
    inputs: Inputs
    draws: itertools.count[int] = field(default_factory=itertools.count)
    rounded: RoundedRows = field(init=False)

    def __post_init__(self) -> None:
        self.rounded = rounded_rows(self._row_kinds())

    def run(
        self, hidden_rsh: torch.Tensor, choose: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[Site, torch.Tensor]:
        """Compute all sites; `choose` turns biased scores [R,S,E] into the experts that run, [R,S,k]."""
        mask_rs = self.inputs.attention_mask.to(hidden_rsh.device).repeat(len(self.layer.kinds), 1)
        sites = self._run_attention(hidden_rsh, mask_rs)
        self._run_mlp(sites, mask_rs, choose)
        return sites

    def _run_attention(self, hidden: torch.Tensor, mask_rs: torch.Tensor) -> dict[Site, torch.Tensor]:
        """Compute the sites up to `post_norm`."""
        cos, sin = self._rotation(hidden.device)
        sites = {Site.INPUT_NORM: self._norm(hidden, weight_names.INPUT_NORM)}
        for projection, weight in (
            (Site.Q_PROJ, weight_names.Q_PROJ),
            (Site.K_PROJ, weight_names.K_PROJ),
            (Site.V_PROJ, weight_names.V_PROJ),
        ):
            product = self._round(linear(sites[Site.INPUT_NORM], self._weight(weight, hidden)))
            bias = bias_name(self.layer.spec.graph, weight)
            # Devices add a bias to a product that was rounded.
            sites[projection] = product if bias is None else self._round(product + self._weight(bias, hidden))
        queries, keys = Site.Q_PROJ, Site.K_PROJ
        if self.layer.spec.graph.has_qk_norm:
            queries, keys = Site.Q_NORM, Site.K_NORM
            sites[queries] = self._norm(sites[Site.Q_PROJ], weight_names.Q_NORM)
            sites[keys] = self._norm(sites[Site.K_PROJ], weight_names.K_NORM)
        sites[Site.Q_ROPE] = self._rotate(sites[queries], cos, sin)
        sites[Site.K_ROPE] = self._rotate(sites[keys], cos, sin)
        sites[Site.ATTN_CONTEXT] = self._attend(
            sites[Site.Q_ROPE],
            sites[Site.K_ROPE],
            split_heads(sites[Site.V_PROJ], self.layer.spec.head_dim),
            mask_rs,
        )
        sites[Site.ATTN_DELTA] = self._multiply_halves(
            sites[Site.ATTN_CONTEXT], self._weight(weight_names.O_PROJ, hidden)
        )
        if self.layer.spec.graph.has_output_bias:
            sites[Site.ATTN_DELTA] = self._round(
                sites[Site.ATTN_DELTA] + self._weight(weight_names.O_BIAS, hidden)
            )
        sites[Site.ATTN_RESIDUAL] = self._round(hidden + sites[Site.ATTN_DELTA])
        sites[Site.POST_NORM] = self._norm(sites[Site.ATTN_RESIDUAL], weight_names.POST_NORM)
        return sites

    def _run_mlp(
        self,
        sites: dict[Site, torch.Tensor],
        mask_rs: torch.Tensor,
        choose: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Add the sites after `post_norm`."""
        # Experts number their roundings themselves: another seed keeps these apart from `draws`.
        rounding = ExpertRounding(
            rounding=Rounding(seed=self.layer.seed + 1),
            # The kind of each real token.
            kinds=self._row_kinds().repeat_interleave(mask_rs.sum(-1).cpu()),
        )
        graph, is_real = self.layer.spec.graph, mask_rs.bool()
        if weight_names.GATE not in self.layer.tensors:
            sites[Site.MLP_DELTA] = self._run_whole(DENSE_MLP, sites[Site.POST_NORM], is_real, rounding)
            sites[Site.OUTPUT] = self._round(sites[Site.ATTN_RESIDUAL] + sites[Site.MLP_DELTA])
            return
        delta = self._run_experts(sites, is_real, rounding, choose)
        if graph.has_shared_experts:
            sites[Site.ROUTED_DELTA] = delta
            sites[Site.SHARED_DELTA] = self._run_whole(SHARED_MLP, sites[Site.POST_NORM], is_real, rounding)
            delta = self._round(self._round(delta * graph.sum_scale) + sites[Site.SHARED_DELTA])
        sites[Site.MOE_DELTA] = delta
        sites[Site.OUTPUT] = self._round(sites[Site.ATTN_RESIDUAL] + delta)

    def _run_whole(
        self, names: MlpNames, states: torch.Tensor, is_real: torch.Tensor, rounding: ExpertRounding
    ) -> torch.Tensor:
        """Run all real tokens through an MLP: [R,S,H]."""
        # The number behind those of the routed experts.
        rounded = rounding.of_expert(
            self.layer.spec.num_local_experts, torch.arange(len(rounding.kinds), device=states.device)
        )
        delta, graph = torch.zeros_like(states), self.layer.spec.graph
        delta[is_real] = run_rounded(self.layer.tensors, names, graph, states[is_real], Scratch(), rounded)
        return delta

    def _run_experts(
        self,
        sites: dict[Site, torch.Tensor],
        is_real: torch.Tensor,
        rounding: ExpertRounding,
        choose: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Add the router's sites, and return the routed experts' sum, [R,S,H]."""
        states = sites[Site.POST_NORM]
        router = Router.of(self.layer.spec, self.layer.tensors)
        logits = linear(states, self._weight(weight_names.GATE, states))
        has_float32_router = self.layer.spec.graph.has_float32_router
        sites[Site.ROUTER_LOGITS] = logits if has_float32_router else self._round(logits)
        scores = router.scores(sites[Site.ROUTER_LOGITS])
        sites[Site.ROUTER_EXPERTS] = router.choose(scores)
        experts = choose(router.biased(scores))
        shares = router.shares(scores, experts)
        has_float32_shares = self.layer.spec.graph.has_float32_shares
        sites[Site.ROUTER_WEIGHTS] = shares if has_float32_shares else self._round(shares)
        delta = torch.zeros_like(states)
        delta[is_real] = upcast_experts(
            self.layer.tensors,
            states[is_real],
            experts[is_real],
            sites[Site.ROUTER_WEIGHTS][is_real],
            graph=self.layer.spec.graph,
            rounding=rounding,
        )
        return delta

    def _weight(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self.layer.tensors[name].to(like.device, torch.float32)

    def _row_kinds(self) -> torch.Tensor:
        """Return the rounding kind of each row, [R]."""
        return torch.tensor(self.layer.kinds).repeat_interleave(self.inputs.batch_size)

    def _round(self, values: torch.Tensor) -> torch.Tensor:
        """Round values [R,…] in place, each row by its kind, and return them: nothing else may use the tensor."""
        return Rounding(seed=self.layer.seed).apply(values, self.rounded, draw=next(self.draws))

    def _norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weight(name, states)
        # The states of a token, or those of each of its heads.
        parts = states.unflatten(-1, (-1, len(weight)))
        mean_square = parts.square().mean(-1, keepdim=True)
        normed = (parts * torch.rsqrt(mean_square + self.layer.spec.rms_norm_eps)).flatten(-2)
        gain = weight.repeat(parts.shape[-2])
        if self.layer.spec.graph.has_gain_of_one_plus:
            return self._round(normed.mul_(1.0 + gain))
        return self._round(self._round(normed).mul_(gain))

    def _rotation(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of every position, [R,1,S,rotary_dim/2]; all heads share their rounding errors."""
        rotary_dim = self.layer.spec.rotary_dim
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        positions = self.inputs.position_ids.to(device)[:, None, :, None].float()
        angles = (positions / self.layer.spec.rope_theta**exponents).repeat(len(self.layer.kinds), 1, 1, 1)
        return self._round(angles.cos()), self._round(angles.sin())

    def _rotate(self, flat: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = split_heads(flat, self.layer.spec.head_dim)
        first, second = heads[..., : self.layer.spec.rotary_dim].chunk(2, dim=-1)
        turned = (
            self._round(self._round(first * cos) - self._round(second * sin)),
            self._round(self._round(second * cos) + self._round(first * sin)),
        )
        return torch.cat((*turned, heads[..., self.layer.spec.rotary_dim :]), dim=-1)

    def _attend(
        self, q_rnsd: torch.Tensor, k_rksd: torch.Tensor, v_rksd: torch.Tensor, mask_rs: torch.Tensor
    ) -> torch.Tensor:
        """Compute causal attention [R,S,N·D] with padded keys hidden, some heads of a row at a time."""
        heads_per_kv = self.layer.spec.num_attention_heads // self.layer.spec.num_key_value_heads
        num_rows, num_heads, length, _ = q_rnsd.shape
        causal = torch.ones(length, length, dtype=torch.bool, device=q_rnsd.device).tril()
        context = torch.empty_like(q_rnsd)
        heads_at_once = max(_MOST_SCORES // length**2, 1)
        kinds = self._row_kinds()
        for row in range(num_rows):
            rounded = rounded_rows(kinds[row : row + 1])
            visible = causal & mask_rs[row].bool()
            for start in range(0, num_heads, heads_at_once):
                heads = slice(start, min(start + heads_at_once, num_heads))
                keys = k_rksd[row].repeat_interleave(heads_per_kv, dim=0)[heads]
                values = v_rksd[row].repeat_interleave(heads_per_kv, dim=0)[heads]
                scores = self._round_row(q_rnsd[row][heads] @ keys.transpose(-1, -2), rounded)
                scores = self._round_row(scores * self.layer.spec.head_dim**-0.5, rounded)
                # A finite minimum: a padded query that sees nothing must not become NaN.
                scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
                shares = self._round_row(scores.softmax(dim=-1), rounded)
                context[row, heads] = shares @ values
        return self._round(context.transpose(1, 2).flatten(2))

    def _round_row(self, values: torch.Tensor, rounded: RoundedRows) -> torch.Tensor:
        """Round values of one row, all of one kind; `rounded` is of a batch that holds this row alone."""
        return Rounding(seed=self.layer.seed).apply(values[None], rounded, draw=next(self.draws))[0]

    def _multiply_halves(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply in halves, rounded before they are added, as two ranks of tensor parallelism do."""
        halves = zip(states.chunk(2, dim=-1), weight.chunk(2, dim=-1), strict=True)
        first, second = (self._round(linear(part, columns)) for part, columns in halves)
        return self._round(first + second)


def run_variants(
    names: tuple[str, ...],
    hidden_states: torch.Tensor,
    inputs: Inputs,
    *,
    spec: ModelSpec,
    tensors: Mapping[str, torch.Tensor],
    router_experts: torch.Tensor | None,
    layer: int,
) -> Mapping[str, Mapping[Site, torch.Tensor]]:
    """Compute the variants of one layer side by side; every site but the input, float32, by the variant's name.

    All replay the golden's choice `router_experts`, int64 [B,S,k]: a flip is no rounding error. The site
    `router_experts` of the result is the variant's own choice. `layer`, its number, is the seed of the random steps.
    """
    kinds = tuple(RoundingKind.NEAREST if name == NEAREST else RoundingKind.RANDOM for name in names)
    computed = RoundedLayer(spec, tensors, kinds=kinds, seed=layer).run(
        hidden_states, inputs, router_experts=router_experts
    )
    return dict(zip(names, computed, strict=True))
