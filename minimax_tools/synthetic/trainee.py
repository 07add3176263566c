"""Trainee: transformers' MiniMax-M2 in float32, with its loss, its choice of experts and its tensors.

B batch, S sequence, T tokens (B·S), k experts of a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from minimax_tools.model import weight_names
from minimax_tools.reference.modules import require_golden_extra
from minimax_tools.split.causal_model import make_causal_config

# A function that returns other experts [T,k] for a layer's choice [T,k].
Reroute = Callable[[torch.Tensor], torch.Tensor]


class Trainee:
    """A MiniMaxM2ForCausalLM on the CPU in float32, with weights drawn by a seed.

    Args:
        config: Content of config.json.
        seed: Seed of the first weights.

    Raises:
        MissingExtraError: transformers or accelerate is not installed.
    """

    def __init__(self, config: Mapping[str, Any], *, seed: int) -> None:
        require_golden_extra("training a model")
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        self.module: torch.nn.Module = AutoModelForCausalLM.from_config(
            make_causal_config(config, where=Path("the model to be trained")),
            dtype=torch.float32,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        )
        self._num_experts: int = config["num_local_experts"]
        self._choices: dict[int, torch.Tensor] = {}
        self._reroute: Reroute | None = None
        for layer, module in enumerate(self._layers()):
            module.get_submodule("mlp.gate").register_forward_hook(self._hook(layer))

    def token_losses(self, rows_bs: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy [B, S-1] in nats of all tokens but each row's first, from token ids int64 [B,S]."""
        logits = self.module(input_ids=rows_bs[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), rows_bs[:, 1:].flatten(), reduction="none"
        )
        return losses.view(rows_bs.shape[0], -1)

    @property
    def choices(self) -> list[torch.Tensor]:
        """Experts [T,k] that each layer chose in the last forward, int64."""
        return [self._choices[layer] for layer in sorted(self._choices)]

    def balance(self, *, rate: float) -> None:
        """Move each expert's correction bias by `rate`: up if the expert got fewer tokens than the mean, else down.

        Tokens are those of the last forward. No gradient moves the bias.
        """
        for layer, choice in zip(self._layers(), self.choices, strict=True):
            load = torch.bincount(choice.flatten(), minlength=self._num_experts).float()
            bias = layer.get_submodule("mlp").get_buffer("e_score_correction_bias")
            bias.add_(torch.sign(load.mean() - load), alpha=rate)

    @contextlib.contextmanager
    def rerouted(self, reroute: Reroute) -> Iterator[None]:
        """Apply `reroute` to each layer's choice of experts in the block; the routing weights stay as they were."""
        self._reroute = reroute
        try:
            yield
        finally:
            self._reroute = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by the hub's names, as float32 detached views."""
        state = {name: tensor.detach() for name, tensor in self.module.state_dict().items()}
        return dict(_hub_tensors(state))

    def _layers(self) -> list[torch.nn.Module]:
        return list(self.module.get_submodule("model.layers").children())

    def _hook(self, layer: int) -> Callable[..., Any]:
        """Return a hook of the layer's gate that records the choice of experts, rerouted if that is asked for."""

        def record(_: torch.nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> Any:
            logits, weights, experts = output
            if self._reroute is not None:
                experts = self._reroute(experts)
            self._choices[layer] = experts.detach()
            return logits, weights, experts

        return record


def _hub_tensors(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield transformers' tensors under the hub's names, with one tensor for each matrix of an expert."""
    for name, tensor in state.items():
        layer = weight_names.layer_of(name)
        if name.endswith("mlp.experts.gate_up_proj"):
            for expert, gate_up in enumerate(tensor):
                gate, up = gate_up.chunk(2)
                yield _expert_name(layer, expert, weight_names.EXPERT_GATE), gate
                yield _expert_name(layer, expert, weight_names.EXPERT_UP), up
        elif name.endswith("mlp.experts.down_proj"):
            for expert, down in enumerate(tensor):
                yield _expert_name(layer, expert, weight_names.EXPERT_DOWN), down
        else:
            yield name.replace(".mlp.", ".block_sparse_moe."), tensor


def _expert_name(layer: int | None, expert: int, matrix: str) -> str:
    assert layer is not None, "experts belong to layers"
    return weight_names.layer_prefix(layer) + weight_names.expert_weight(expert, matrix)
