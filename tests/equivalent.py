"""Changes of a checkpoint's tensors that keep what the model computes.

| change | tensors | result |
|---|---|---|
| scale_norms | a norm's channels against the linear layers that read them | same bits |
| scale_values | rows of v_proj against columns of o_proj | same bits |
| scale_experts | rows of w3 against columns of w2 | same bits |
| scale_keys | k_norm against q_norm; a rotated pair of channels is scaled alike | same bits |
| scale_stream | embedding, o_proj, w2 and eps: the whole residual stream | same bits |
| permute_experts | experts in another order | other order of summation |
| permute_heads | key-value groups, and query heads within a group | other order of summation |
| permute_channels | channels of the residual stream | other order of summation |

Scales are powers of two, which change no mantissa: products and sums keep their bits while they stay in the dtype's
range. Single channels of the residual stream cannot be scaled, because RMSNorm's mean mixes them. An exact change
cannot give an attention sink, because softmax sees only values that the change must keep.

H hidden, N heads, K kv heads, D head_dim, E experts, I intermediate.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import UsageError
from minimax_tools.machine.files import new_folder
from minimax_tools.model import weight_names
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.checkpoint import write_json, write_shards

Tensors = dict[str, torch.Tensor]
# Changes tensors and the values of config.json in place; a generator draws the numbers.
Rewrite = Callable[[Tensors, dict[str, Any], ModelSpec, torch.Generator], None]

# Exponents of two: of most channels, and of the few massive ones.
_ORDINARY_EXPONENTS = (-1, 0, 1)
_MASSIVE_EXPONENT = 6
_NUM_MASSIVE = 3
_STREAM_EXPONENT = 5


def scale_norms(tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator) -> None:
    """Scale the channels of each norm of the stream, three of them by 64, and undo it in the next linear layers."""
    for layer in range(spec.num_hidden_layers):
        prefix = weight_names.layer_prefix(layer)
        attention = [
            prefix + name for name in (weight_names.Q_PROJ, weight_names.K_PROJ, weight_names.V_PROJ)
        ]
        experts = [
            prefix + weight_names.expert_weight(expert, matrix)
            for expert in range(spec.num_local_experts)
            for matrix in (weight_names.EXPERT_GATE, weight_names.EXPERT_UP)
        ]
        _scale_norm(tensors, prefix + weight_names.INPUT_NORM, attention, generator)
        _scale_norm(
            tensors, prefix + weight_names.POST_NORM, [prefix + weight_names.GATE, *experts], generator
        )
    _scale_norm(tensors, weight_names.FINAL_NORM, [weight_names.LM_HEAD], generator)


def scale_values(tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator) -> None:
    """Scale the rows of v_proj, and undo it in the columns of o_proj."""
    for layer in range(spec.num_hidden_layers):
        prefix = weight_names.layer_prefix(layer)
        scale = _draw_scale(spec.key_value_width, generator)
        _multiply(tensors, prefix + weight_names.V_PROJ, scale[:, None])
        _multiply(tensors, prefix + weight_names.O_PROJ, 1 / _for_query_heads(scale, spec))


def scale_experts(tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator) -> None:
    """Scale the rows of every expert's w3, and undo it in the columns of w2."""
    for layer in range(spec.num_hidden_layers):
        for expert in range(spec.num_local_experts):
            prefix = weight_names.layer_prefix(layer)
            scale = _draw_scale(spec.intermediate_size, generator)
            _multiply(
                tensors, prefix + weight_names.expert_weight(expert, weight_names.EXPERT_UP), scale[:, None]
            )
            _multiply(
                tensors, prefix + weight_names.expert_weight(expert, weight_names.EXPERT_DOWN), 1 / scale
            )


def scale_keys(tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator) -> None:
    """Scale k_norm, and undo it in q_norm: keys gain massive channels, attention's scores stay."""
    half = spec.rotary_dim // 2
    for layer in range(spec.num_hidden_layers):
        prefix = weight_names.layer_prefix(layer)
        scale = _draw_scale(spec.key_value_width, generator).unflatten(0, (-1, spec.head_dim))
        # Rotation mixes channel i with i + rotary_dim / 2.
        scale[:, half : 2 * half] = scale[:, :half]
        _multiply(tensors, prefix + weight_names.K_NORM, scale.flatten())
        _multiply(tensors, prefix + weight_names.Q_NORM, 1 / _for_query_heads(scale.flatten(), spec))


def scale_stream(tensors: Tensors, config: dict[str, Any], spec: ModelSpec, _: torch.Generator) -> None:
    """Scale all inputs of the residual stream by 32, and eps by 32².

    q_proj and k_proj are scaled too, because their norms have the same eps.
    """
    factor = torch.tensor(2.0**_STREAM_EXPONENT)
    config["rms_norm_eps"] = spec.rms_norm_eps * float(factor) ** 2
    _multiply(tensors, weight_names.EMBEDDING, factor)
    for layer in range(spec.num_hidden_layers):
        prefix = weight_names.layer_prefix(layer)
        for name in (weight_names.O_PROJ, weight_names.Q_PROJ, weight_names.K_PROJ):
            _multiply(tensors, prefix + name, factor)
        for expert in range(spec.num_local_experts):
            _multiply(tensors, prefix + weight_names.expert_weight(expert, weight_names.EXPERT_DOWN), factor)


def permute_experts(tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator) -> None:
    """Put each layer's experts into another order, with their rows of gate and bias."""
    for layer in range(spec.num_hidden_layers):
        prefix = weight_names.layer_prefix(layer)
        order = torch.randperm(spec.num_local_experts, generator=generator)
        for name in (weight_names.GATE, weight_names.CORRECTION_BIAS):
            _take(tensors, prefix + name, order, dim=0)
        for matrix in weight_names.EXPERT_MATRICES:
            old = [tensors[prefix + weight_names.expert_weight(expert, matrix)] for expert in order.tolist()]
            for expert, tensor in enumerate(old):
                tensors[prefix + weight_names.expert_weight(expert, matrix)] = tensor


def permute_heads(tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator) -> None:
    """Put key-value groups into another order, and the query heads within each group."""
    group = spec.num_attention_heads // spec.num_key_value_heads
    for layer in range(spec.num_hidden_layers):
        prefix = weight_names.layer_prefix(layer)
        groups = torch.randperm(spec.num_key_value_heads, generator=generator)
        within = torch.stack([torch.randperm(group, generator=generator) for _ in groups])
        keys = _rows_of_heads(groups, spec.head_dim)
        queries = _rows_of_heads((groups[:, None] * group + within).flatten(), spec.head_dim)
        for name in (weight_names.K_PROJ, weight_names.V_PROJ, weight_names.K_NORM):
            _take(tensors, prefix + name, keys, dim=0)
        for name in (weight_names.Q_PROJ, weight_names.Q_NORM):
            _take(tensors, prefix + name, queries, dim=0)
        _take(tensors, prefix + weight_names.O_PROJ, queries, dim=1)


def permute_channels(
    tensors: Tensors, _: dict[str, Any], spec: ModelSpec, generator: torch.Generator
) -> None:
    """Put the residual stream's channels into another order, the same in all layers."""
    order = torch.randperm(spec.hidden_size, generator=generator)
    for name, tensor in tensors.items():
        if name.endswith((weight_names.Q_NORM, weight_names.K_NORM, weight_names.CORRECTION_BIAS)):
            continue
        writes = (
            name.endswith((weight_names.O_PROJ, f".{weight_names.EXPERT_DOWN}.weight")) or tensor.dim() == 1
        )
        _take(tensors, name, order, dim=0 if writes else 1)


CHANGES: Mapping[str, Rewrite] = MappingProxyType(
    {
        "scale_norms": scale_norms,
        "scale_values": scale_values,
        "scale_experts": scale_experts,
        "scale_keys": scale_keys,
        "scale_stream": scale_stream,
        "permute_experts": permute_experts,
        "permute_heads": permute_heads,
        "permute_channels": permute_channels,
    }
)


def _scale_norm(tensors: Tensors, norm: str, readers: list[str], generator: torch.Generator) -> None:
    scale = _draw_scale(len(tensors[norm]), generator)
    _multiply(tensors, norm, scale)
    for name in readers:
        _multiply(tensors, name, 1 / scale)


def _draw_scale(width: int, generator: torch.Generator) -> torch.Tensor:
    """Draw powers of two [width], up to three of them massive."""
    choices = torch.tensor(_ORDINARY_EXPONENTS)
    exponents = choices[torch.randint(len(choices), (width,), generator=generator)]
    exponents[torch.randperm(width, generator=generator)[:_NUM_MASSIVE]] = _MASSIVE_EXPONENT
    scale: torch.Tensor = 2.0**exponents
    return scale


def _for_query_heads(scale: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Repeat a vector [K·D] for each query head of its group: [N·D]."""
    group = spec.num_attention_heads // spec.num_key_value_heads
    heads: torch.Tensor = scale.view(-1, spec.head_dim)
    return heads.repeat_interleave(group, dim=0).flatten()


def _rows_of_heads(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _multiply(tensors: Tensors, name: str, scale: torch.Tensor) -> None:
    tensors[name] = tensors[name] * scale.to(tensors[name].dtype)


def _take(tensors: Tensors, name: str, order: torch.Tensor, *, dim: int) -> None:
    tensors[name] = tensors[name].index_select(dim, order)


_CONFIG = "config.json"


class _ReadyTensors:
    """Maker that gives tensors as they are."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def make(self, name: str, *, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Give the whole tensor `name`."""
        tensor = self._tensors[name]
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), f"{name} is not as planned"
        yield tensor


def rewrite_checkpoint(source: Path, output: Path, *, changes: Sequence[str], seed: int) -> None:
    """Write the checkpoint `source` to `output` with changes that keep what it computes.

    All tensors are in memory at once: this is for small models.

    Args:
        source: A checkpoint in BF16 or float32.
        output: A folder that is absent or empty.
        changes: Names in `CHANGES`, in the order of their application.
        seed: Seed of the changes.

    Raises:
        UsageError: A change is unknown, the checkpoint is in FP8, a scaled value leaves the range of its dtype, or
            `output` is not empty.
        CheckpointError: `source` cannot be read, or `output` cannot be written.
    """
    unknown = [change for change in changes if change not in CHANGES]
    if unknown:
        raise UsageError(f"there is no change {', '.join(unknown)}", expected=f"one of {', '.join(CHANGES)}")
    config = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
    spec = ModelSpec.from_folder(source)
    with CheckpointReader(source) as reader:
        tensors = {name: reader.read(name) for name in reader.index.names}
    if any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values()):
        raise UsageError(
            f"the weights at {source} are FP8",
            expected="BF16 or float32: a block of FP8 has one scale for all its channels",
            next_step="Rewrite the BF16 copy of the model.",
        )
    generator = torch.Generator().manual_seed(seed)
    for change in changes:
        CHANGES[change](tensors, config, spec, generator)
    _refuse_overflow(tensors)
    plan = tuple(TensorSize.of(name, tensor) for name, tensor in sorted(tensors.items()))
    size_bytes = sum(tensor.size_bytes for tensor in plan)
    with new_folder(output, size_bytes=size_bytes, remedy="Name an --output with more room.") as folder:
        for path in source.iterdir():
            if path.is_file() and path.name != _CONFIG and "safetensors" not in path.name:
                shutil.copy(path, folder)
        write_json(folder / _CONFIG, config)
        write_shards(folder, plan, _ReadyTensors(tensors), shard_size_bytes=None)


def _refuse_overflow(tensors: dict[str, torch.Tensor]) -> None:
    spoilt = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if spoilt:
        raise UsageError("these changes leave the range of the stored dtype", found=", ".join(spoilt[:4]))
