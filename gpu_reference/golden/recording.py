"""The sites of the layers and of the model, copied to the CPU as the golden model computes them.

Expert tokens: hidden states set at each layer's input, so that they reach experts that hardly any other token chooses.
They are made anew for each layer, by its own attention and router, from states that other tokens have at its input.

B rows, S columns, T natural tokens (all real ones but the expert tokens), n expert tokens, H hidden, E experts, k
experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from gpu_reference.model.model_checks import weight_of
from minimax_tools.capture.recorder import copy_to_host, shape_to_batch
from minimax_tools.errors import GoldenRefusedError, install_command
from minimax_tools.model.graph import ModelGraph, RouterScores
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.reference.float32_stages import gain_of
from minimax_tools.reference.modules import recording_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_MODULES: Mapping[ModelSite, str] = MappingProxyType(
    {
        ModelSite.FINAL_NORM: "model.norm",
        ModelSite.LOGITS: "lm_head",
    }
)


# Distance of the k-th from the (k+1)-th biased score: a smaller one could be closed by BF16's noise.
_MARGIN = 0.02
# Distance by which a natural token must choose an expert: another machine may leave out what is chosen by less.
_LEAD = _MARGIN / 4
# Distance to aim at, as the states are rounded.
_AIM = 1.5 * _MARGIN
# Scores to aim at: a sigmoid hardly moves beyond them.
_LOWEST, _HIGHEST = 0.02, 0.95
# Evaluations of attention, which changes with the states, and steps of the router between two of them.
_MOST_EVALUATIONS, _MOST_STEPS = 16, 20
# Relative weight of small changes over exact ones: gates may have rows that hardly differ.
_RIDGE = 1e-4


@contextmanager
def setting_expert_tokens(layer: torch.nn.Module, inputs: Inputs, graph: ModelGraph) -> Iterator[None]:
    """During the block, set the states of the expert tokens whenever transformers' decoder layer runs."""

    def set_states(
        module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        hidden_states, *others = arguments
        states = _make_states(
            _LayerFront(layer=module, graph=graph, keywords=keywords), hidden_states, inputs
        )
        hidden_states = hidden_states.clone()
        hidden_states[inputs.is_expert_token.to(hidden_states.device)] = states.to(hidden_states)
        return (hidden_states, *others), keywords

    handle = layer.register_forward_pre_hook(set_states, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerFront:
    """A decoder layer up to its router, called with `keywords` for all rows."""

    layer: Any  # transformers' decoder layer
    graph: ModelGraph
    keywords: Mapping[str, Any]

    def residual(self, hidden_states: torch.Tensor, rows: slice) -> torch.Tensor:
        """Compute what the router's norm is given, [b,S,H] on the CPU, for some rows of the batch [b,S,H]."""
        layer, weight = self.layer, self.layer.input_layernorm.weight
        # accelerate moves what it is given to the device of a layer: here nobody does, unless the layer is offloaded.
        device = hidden_states.device if weight.is_meta else weight.device
        hidden_states = hidden_states.to(device)
        delta, _ = layer.self_attn(
            hidden_states=layer.input_layernorm(hidden_states),
            **{
                name: _take_rows(self.keywords[name], rows, device)
                for name in ("position_embeddings", "attention_mask", "position_ids")
            },
        )
        residual: torch.Tensor = hidden_states + delta
        return residual.cpu()

    def router(self) -> _Router:
        """Return the layer's router."""
        mlp = self.layer.mlp
        gate, norm = weight_of(mlp.gate, "weight"), weight_of(self.layer.post_attention_layernorm, "weight")
        gain = (gate.double() * gain_of(self.graph, norm.to(gate.device).double())).cpu()
        bias = torch.zeros(len(gain), dtype=torch.float64)
        if self.graph.has_correction_bias:
            # It lies with the gate in some families, and beside it in others.
            owner = mlp if hasattr(mlp, "e_score_correction_bias") else mlp.gate
            bias = weight_of(owner, "e_score_correction_bias").double().cpu()
        is_linear = self.graph.router_scores is RouterScores.SOFTMAX
        return _Router(gain=gain, bias=bias, num_chosen=mlp.gate.top_k, is_linear=is_linear)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Router:
    """A router that reads states of RMS 1, in float64 on the CPU."""

    gain: torch.Tensor  # [E,H]: the gate's rows times the weight of the norm before it
    bias: torch.Tensor  # correction bias [E]
    num_chosen: int  # k
    # Whether logits choose as scores do, since a softmax keeps their order: margins are then of logits.
    is_linear: bool

    @property
    def unit(self) -> float:
        """The factor on all margins: a sigmoid's slope is at most 1/4, and half of that near the scores of choice."""
        return 8.0 if self.is_linear else 1.0

    @property
    def num_experts(self) -> int:
        return len(self.bias)

    def biased_scores(self, states: torch.Tensor) -> torch.Tensor:
        """Return the scores [T,E] of states [T,H] by which experts are chosen."""
        return self._score(self.logits(states)) + self.bias

    def _score(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.is_linear else logits.sigmoid()

    def _unscore(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.is_linear else scores.clamp(_LOWEST, 1 - _LOWEST).logit()

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [T,E] of states [T,H] of any RMS."""
        return _with_rms_1(states) @ self.gain.T

    def choose(self, biased: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Choose the wanted experts, bool [T,E], and the best of the others: k of each token, bool [T,E]."""
        first = biased.masked_fill(wanted, torch.inf).topk(self.num_chosen, dim=-1).indices
        return torch.zeros_like(wanted).scatter(-1, first, True)

    def assign(self, biased: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Assign each expert that natural tokens do not clearly choose to the expert token that scores it best.

        Args:
            biased: Scores [T,E] of the natural tokens.
            places: The natural token, int64 [n], whose states each expert token begins with.

        Returns:
            The experts that each expert token is to choose, bool [n,E]: of each about as many, and at most k.
        """
        best = biased.topk(min(self.num_chosen + 1, self.num_experts), dim=-1).values
        is_reached = (biased >= best[:, -1:] + self.unit * _LEAD).any(0)
        missing = () if len(self.bias) == self.num_chosen else (~is_reached).nonzero().flatten().tolist()
        most = min(math.ceil(len(missing) / len(places)), self.num_chosen)
        wanted = torch.zeros(len(places), self.num_experts, dtype=torch.bool)
        for expert in missing:
            is_free = wanted.sum(-1) < most
            if bool(is_free.any()):
                wanted[biased[places, expert].masked_fill(~is_free, -torch.inf).argmax(), expert] = True
        return wanted

    def steer(self, states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Change states [n,H] as little as possible, so that each chooses its wanted experts, bool [n,E], clearly."""
        gram = self.gain @ self.gain.T
        gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
        # The smallest change of a state that changes the logits by one each: [E,H].
        changes = torch.linalg.solve(gram, self.gain)
        for _ in range(_MOST_STEPS):
            states = _with_rms_1(states)
            missing = self._missing_logits(states, wanted)
            if not bool(missing.any()):
                break
            states = states + missing @ changes
        return _with_rms_1(states)

    def _missing_logits(self, states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return what the logits [n,E] lack, so that the experts to choose score clearly higher than all others."""
        logits = self.logits(states)
        biased, aim = self._score(logits) + self.bias, self.unit * _AIM
        chosen = self.choose(biased, wanted)
        # The border lies above the other experts, as far as the scores of the chosen ones can pass it.
        highest = torch.inf if self.is_linear else _HIGHEST
        reachable = (self.bias + highest).expand_as(biased).masked_fill(~chosen, torch.inf).amin(-1)
        others = biased.masked_fill(chosen, -torch.inf).amax(-1)
        border = torch.minimum(others + aim / 2, reachable - aim / 2)[:, None]
        least, most = (self._unscore(border + side * aim / 2 - self.bias) for side in (1, -1))
        return torch.where(chosen, (least - logits).clamp(min=0.0), (most - logits).clamp(max=0.0))


def _make_states(front: _LayerFront, hidden_states: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Make the states [n,H] of the expert tokens, out of the states of natural tokens in [B,S,H]."""
    assert inputs.expert_tokens is not None, "only a batch with expert tokens has states to make"
    router, all_rows, host = front.router(), slice(None), inputs.expert_tokens.row
    is_natural, is_made = inputs.natural().attention_mask.bool(), inputs.is_expert_token
    biased = router.biased_scores(front.residual(hidden_states, all_rows)[is_natural].double())
    places = torch.linspace(0, len(biased) - 1, inputs.expert_tokens.count).round().long()
    states = hidden_states.cpu()[is_natural][places].double()
    wanted = router.assign(biased, places)
    rows = slice(host, host + 1)
    row, is_made = hidden_states[rows].cpu(), is_made[rows]
    for _ in range(_MOST_EVALUATIONS):
        row = row.clone()
        row[is_made] = states.to(row)
        residual = front.residual(row.to(hidden_states), rows)[is_made].double()
        if _are_clear(router, residual, wanted):
            break
        steered = router.steer(residual, wanted) * _rms(residual)
        states = steered - (residual - row[is_made].double())
    return row[is_made]


def _are_clear(router: _Router, residual: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Decide whether all tokens [n,H] choose what they should, bool [n,E], clearly."""
    biased = router.biased_scores(residual)
    chosen = router.choose(biased, wanted)
    lowest = biased.masked_fill(~chosen, torch.inf).amin(-1)
    return bool((lowest - biased.masked_fill(chosen, -torch.inf).amax(-1) >= router.unit * _MARGIN).all())


def _rms(states: torch.Tensor) -> torch.Tensor:
    return states.square().mean(-1, keepdim=True).sqrt()


def _with_rms_1(states: torch.Tensor) -> torch.Tensor:
    return states / _rms(states)


def _take_rows(value: Any, rows: slice, device: torch.device) -> Any:
    """Return some rows of a layer's argument: a tensor that begins with B, a tuple of such, or None."""
    if isinstance(value, tuple):
        return tuple(_take_rows(part, rows, device) for part in value)
    return value if value is None else value[rows].to(device)


# Called with a layer's number, its sites on the CPU ([B, S, …]; with heads [B, heads, S, D]), and the device that it
# ran on.
LayerSink = Callable[[int, Mapping[Site, torch.Tensor], torch.device], None]


@contextmanager
def recording_layers(
    model: PreTrainedModel,
    layers: tuple[int, ...],
    *,
    sites: frozenset[Site],
    inputs: Inputs,
    graph: ModelGraph,
    sink: LayerSink,
) -> Iterator[None]:
    """During the block, give the sites of each of `layers` to `sink` as soon as the layer has run, then drop them.

    The states of expert tokens are set at the input of each of these layers.

    Raises:
        GoldenRefusedError: A layer ran and did not show all of `sites`.
    """
    attn_implementation = str(model.config._attn_implementation)

    def record(number: int, stack: ExitStack) -> None:
        layer = model.get_submodule(f"model.layers.{number}")
        if inputs.expert_tokens is not None and not graph.layer(number).is_dense:
            stack.enter_context(setting_expert_tokens(layer, inputs, graph))
        tensors = stack.enter_context(
            recording_layer(
                layer, sites=sites, graph=graph.layer(number), attn_implementation=attn_implementation
            )
        )

        def hand_over(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
            _require_sites(number, sites & frozenset(graph.layer(number).sites), tensors)
            recorded = {
                site: shape_to_batch(site, tensors[site], inputs.batch_shape)
                for site in Site
                if site in tensors
            }
            sink(number, recorded, output.device)
            tensors.clear()

        # Hooks fire in the order in which they were registered: this one after those that record.
        stack.callback(layer.register_forward_hook(hand_over).remove)

    with ExitStack() as stack:
        for number in layers:
            record(number, stack)
        yield


@contextmanager
def recording_model(
    model: PreTrainedModel, sites: tuple[ModelSite, ...]
) -> Iterator[Mapping[ModelSite, torch.Tensor]]:
    """Record sites outside the layers during the block. A site is in the mapping once it has been computed."""
    tensors: dict[ModelSite, torch.Tensor] = {}

    def keep(site: ModelSite, _: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
        tensors[site] = copy_to_host(output)

    with ExitStack() as stack:
        for site in sites:
            # The embedding is not recorded: it is the first layer's input.
            if site not in _MODULES:
                continue
            module = model.get_submodule(_MODULES[site])
            stack.callback(module.register_forward_hook(partial(keep, site)).remove)
        yield tensors


def _require_sites(number: int, sites: frozenset[Site], tensors: Mapping[Site, torch.Tensor]) -> None:
    missing = [str(site) for site in Site if site in sites and site not in tensors]
    if missing:
        raise GoldenRefusedError(
            f"layer {number} of transformers' model does not show {', '.join(missing)}",
            next_step=f"Install the transformers that mm2 knows: {install_command('golden')}",
        )
