"""Trainee: transformers' model of a family in float32: its tensors, its training, its bits per byte of held-out text.

AdamW learns next tokens. Only the load of the experts moves the router's bias; a router without one learns
transformers' loss of balance too. With the same options, text, torch and number of threads the weights are the same
bit for bit.

B batch, S sequence, T tokens (B·S), k experts of a token.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minimax_tools.model import weight_names
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.modules import require_golden_extra
from minimax_tools.split.causal_part import make_causal_config
from training.text import TokenStream

_log = logging.getLogger(__name__)

# Usual settings for small language models.
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
# Limit on the norm of all gradients together.
_LARGEST_GRADIENT = 1.0
# Weight of the loss of balance, where no bias balances the experts.
_BALANCE = 0.01
_WARMUP_STEPS = 40
# Learning rate at the end, as a share of the highest.
_FINAL_SHARE = 0.05
# Number of steps from one log message to the next, and over which the logged loss is averaged.
_LOGGED_STEPS = 50
# Root mean square of the embedding's ordinary channels.
_ORDINARY_RMS = 0.5
# Values of the massive channels, taken in turn: 40 to 64 times an ordinary channel.
_MAGNITUDES = (32.0, -28.0, 24.0, -20.0)
# Magnitude of a massive channel after a norm; an ordinary channel has 1.
_MASSIVE_AFTER_NORM = 2.0

# Most tokens that are evaluated, and rows of a batch: they trade precision and memory for time.
_MOST_EVALUATED, _ROWS_AT_ONCE = 32_768, 8

# A function that returns other experts [T,k] for a layer's choice [T,k].
Reroute = Callable[[torch.Tensor], torch.Tensor]


class Trainee:
    """A causal language model of transformers on the CPU in float32, with weights drawn by a seed.

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
        self.spec = ModelSpec.from_config(config)
        self.module: torch.nn.Module = AutoModelForCausalLM.from_config(
            make_causal_config(config, where=Path("the model to be trained")).get_text_config(),
            dtype=torch.float32,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        )
        self._choices: dict[int, torch.Tensor] = {}
        self._reroute: Reroute | None = None
        for layer, module in self._expert_layers().items():
            module.get_submodule("mlp.experts").register_forward_pre_hook(self._hook(layer))

    def token_losses(self, rows_bs: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy [B, S-1] in nats of all tokens but each row's first, from token ids int64 [B,S]."""
        return self._losses(rows_bs)[0]

    def training_loss(self, rows_bs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss to learn, a number, and the part of it that is the mean of `token_losses`."""
        losses, balance = self._losses(rows_bs, balances=not self.spec.graph.has_correction_bias)
        mean = losses.mean()
        return mean if balance is None else mean + _BALANCE * balance, mean

    @property
    def choices(self) -> list[torch.Tensor]:
        """Experts [T,k] that each layer with experts chose in the last forward, int64."""
        return [self._choices[layer] for layer in sorted(self._choices)]

    def balance(self, *, rate: float) -> None:
        """Move each expert's correction bias by `rate`: up if the expert got fewer tokens than the mean, else down.

        Tokens are those of the last forward. No gradient moves the bias. A router without a bias stays.
        """
        if not self.spec.graph.has_correction_bias:
            return
        path = self.spec.family.module_names.stored(weight_names.CORRECTION_BIAS)
        for layer, choice in zip(self._expert_layers().values(), self.choices, strict=True):
            load = torch.bincount(choice.flatten(), minlength=self.spec.num_local_experts).float()
            layer.get_buffer(path).add_(torch.sign(load.mean() - load), alpha=rate)

    @contextlib.contextmanager
    def rerouted(self, reroute: Reroute) -> Iterator[None]:
        """Apply `reroute` to each layer's choice of experts in the block; the routing weights stay as they were."""
        self._reroute = reroute
        try:
            yield
        finally:
            self._reroute = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by mm2's full names, as float32 detached views."""
        state = {name: tensor.detach() for name, tensor in self.module.state_dict().items()}
        tensors = {name: state[name] for name in (weight_names.EMBEDDING, weight_names.FINAL_NORM)}
        tensors[weight_names.LM_HEAD] = state[weight_names.LM_HEAD]
        for layer in range(self.spec.num_hidden_layers):
            prefix = weight_names.layer_prefix(layer)
            of_layer = {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
            tensors |= {prefix + name: tensor for name, tensor in _layer_tensors(self.spec, layer, of_layer)}
        return tensors

    def _losses(
        self, rows_bs: torch.Tensor, *, balances: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `token_losses`, and the loss of balance if it is asked for."""
        output = self.module(
            input_ids=rows_bs[:, :-1], use_cache=False, output_router_logits=balances or None
        )
        losses = torch.nn.functional.cross_entropy(
            output.logits.flatten(0, 1).float(), rows_bs[:, 1:].flatten(), reduction="none"
        )
        return losses.view(rows_bs.shape[0], -1), output.aux_loss if balances else None

    def _expert_layers(self) -> dict[int, torch.nn.Module]:
        """Return the modules of the layers with experts, by number."""
        layers = enumerate(self.module.get_submodule("model.layers").children())
        return {number: layer for number, layer in layers if not self.spec.graph.layer(number).is_dense}

    def _hook(self, layer: int) -> Callable[..., Any]:
        """Return a hook of a layer's experts that records their choice, rerouted if that is asked for."""

        def record(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
            tokens, experts, weights = given
            if self._reroute is not None:
                experts = self._reroute(experts)
            self._choices[layer] = experts.detach()
            return tokens, experts, weights

        return record


def plant_massive_channels(trainee: Trainee, *, count: int, seed: int) -> None:
    """Give an untrained model `count` massive channels, drawn by `seed`, in place.

    In each of these channels all rows of the embedding hold the same large number. The norms' weights are scaled so
    that ordinary channels have magnitude 1 after a norm, as without massive channels.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(trainee.module.named_parameters())
    embedding = parameters["model.embed_tokens.weight"]
    hidden_size = embedding.shape[1]
    channels = torch.randperm(hidden_size, generator=generator)[:count]
    magnitudes = torch.tensor([_MAGNITUDES[number % len(_MAGNITUDES)] for number in range(count)])
    rms = math.sqrt(_ORDINARY_RMS**2 + float(magnitudes.square().sum()) / hidden_size)
    with torch.no_grad():
        embedding.normal_(std=_ORDINARY_RMS, generator=generator)
        embedding[:, channels] = magnitudes
        for name, parameter in parameters.items():
            if name.endswith("layernorm.weight") or name == weight_names.FINAL_NORM:
                parameter.fill_(rms / _ORDINARY_RMS)
                parameter[channels] = _MASSIVE_AFTER_NORM * rms / magnitudes.abs()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of a training."""

    num_steps: int  # number of steps
    learning_rate: float  # highest learning rate of AdamW, after the warm-up; it falls by a cosine
    seed: int  # seed of the first weights and of the rows
    batch_size: int = 4  # number of rows of a step
    seq_len: int = 256  # number of tokens of a row
    # Largest change of an expert's correction bias in a step; it falls as the learning rate does.
    bias_rate: float = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCourse:
    """Length of a training, and its last loss."""

    num_steps: int
    num_tokens: int
    loss: float  # mean of about the last 50 steps, in nats per token
    duration_s: float


def train(trainee: Trainee, text: TokenStream, options: TrainingOptions) -> TrainingCourse:
    """Train on rows drawn from `text`; the trainee's weights change in place."""
    generator = torch.Generator().manual_seed(options.seed)
    optimiser = torch.optim.AdamW(
        _parameter_groups(trainee.module), lr=options.learning_rate, betas=_BETAS, fused=True
    )
    mean_loss = 0.0
    trainee.module.train()
    started_s = time.monotonic()
    for step in range(options.num_steps):
        rows = text.draw_rows(num_rows=options.batch_size, length=options.seq_len + 1, generator=generator)
        loss = _train_step(trainee, optimiser, rows, options, _rate_share(step, options.num_steps))
        num_done = step + 1
        # A running mean that forgets losses older than about `_LOGGED_STEPS` steps.
        mean_loss += (loss - mean_loss) / min(num_done, _LOGGED_STEPS)
        if num_done % _LOGGED_STEPS == 0:
            duration_s = time.monotonic() - started_s
            _log.info("step %d of %d: loss %.3f, %.0f s", num_done, options.num_steps, mean_loss, duration_s)
    trainee.module.eval()
    return TrainingCourse(
        num_steps=options.num_steps,
        num_tokens=options.num_steps * options.batch_size * options.seq_len,
        loss=mean_loss,
        duration_s=time.monotonic() - started_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEvaluation:
    """Results of a model on held-out text. Experts are specialised if bits rise where tokens go to others' experts."""

    num_tokens: int  # that are predicted
    bits_per_byte: float
    bits_per_byte_random_experts: float  # the same if each token goes to the experts of another, random token


@torch.no_grad()
def evaluate(trainee: Trainee, text: TokenStream, *, length: int, seed: int) -> HeldOutEvaluation:
    """Evaluate a model on at most 32 768 tokens of held-out `text`, in rows of `length` tokens; `seed` shuffles."""
    rows = text.cut_rows(length=length + 1, most=max(1, _MOST_EVALUATED // length))
    generator = torch.Generator().manual_seed(seed)
    trainee.module.eval()
    loss = _mean_loss(trainee, rows)
    with trainee.rerouted(lambda experts: experts[torch.randperm(len(experts), generator=generator)]):
        random_loss = _mean_loss(trainee, rows)
    bits_per_byte_of_a_nat = 1 / math.log(2) / text.bytes_per_token
    return HeldOutEvaluation(
        num_tokens=rows[:, 1:].numel(),
        bits_per_byte=loss * bits_per_byte_of_a_nat,
        bits_per_byte_random_experts=random_loss * bits_per_byte_of_a_nat,
    )


def _mean_loss(trainee: Trainee, rows: torch.Tensor) -> float:
    """Return the mean loss in nats per token."""
    losses = [trainee.token_losses(batch).flatten() for batch in rows.split(_ROWS_AT_ONCE)]
    return float(torch.cat(losses).double().mean())


def _train_step(
    trainee: Trainee,
    optimiser: torch.optim.Optimizer,
    rows: torch.Tensor,
    options: TrainingOptions,
    rate_share: float,
) -> float:
    """Take one step with this share of the highest rates; return the mean loss of the rows, in nats per token."""
    for group in optimiser.param_groups:
        group["lr"] = options.learning_rate * rate_share
    loss, of_tokens = trainee.training_loss(rows)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainee.module.parameters(), _LARGEST_GRADIENT)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    trainee.balance(rate=options.bias_rate * rate_share)
    return float(of_tokens.detach())


def _parameter_groups(module: torch.nn.Module) -> list[dict[str, object]]:
    """Group the parameters: matrices except the embedding have weight decay, others have none."""
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in module.named_parameters():
        (decayed if parameter.dim() > 1 and "embed" not in name else others).append(parameter)
    return [{"params": decayed, "weight_decay": _WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


def _rate_share(step: int, num_steps: int) -> float:
    """Return the share of the highest learning rate at a step: a linear warm-up, then a cosine."""
    if step < _WARMUP_STEPS:
        return (step + 1) / _WARMUP_STEPS
    progress = (step - _WARMUP_STEPS) / max(num_steps - _WARMUP_STEPS, 1)
    return _FINAL_SHARE + (1 - _FINAL_SHARE) * (1 + math.cos(math.pi * progress)) / 2


def _layer_tensors(
    spec: ModelSpec, layer: int, state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a layer's tensors by mm2's names, one for each matrix of an expert, from transformers' by its own names."""
    shapes = weight_names.expected_layer_shapes(spec, layer)
    for module, names in weight_names.module_weights(spec, layer).items():
        yield from zip(names, state[module].split([shapes[name][0] for name in names]), strict=True)
    if spec.graph.layer(layer).is_dense:
        return
    for expert in range(spec.num_local_experts):
        own, fused = weight_names.MlpNames.of_expert(expert), state["mlp.experts.gate_up_proj"][expert]
        yield from zip((own.gate, own.up), fused.chunk(2), strict=True)
        yield own.down, state["mlp.experts.down_proj"][expert]
