"""The proofs that a loaded golden model fell into none of the known traps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from minimax_tools.checkpoint.fp8 import find_ragged_widths
from minimax_tools.checkpoint.layer_loader import PackedMatrices
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import GoldenRefusedError, install_command
from minimax_tools.model.quantisation import BLOCK_SIZE
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    EXPERT_DOWN,
    EXPERT_GATE,
    EXPERT_MATRICES,
    EXPERT_UP,
    EXPERTS,
    expected_layer_shapes,
    expert_weight,
    float32_names,
    float32_places,
    module_weights,
    scale_name,
)


def weight_of(module: torch.nn.Module, name: str) -> torch.Tensor:
    """Return the weight that a module computes with, in the dtype that it computes in; fetch it if it is offloaded.

    It lies on its own device or, fetched, where accelerate keeps it, and may share memory with the model.
    """
    weight: torch.Tensor = getattr(module, name)
    if not weight.is_meta:
        return weight.detach()
    # accelerate casts a fetched weight to the dtype of its placeholder.
    fetched: torch.Tensor = _hook(module).weights_map[name]
    return fetched.to(weight.dtype)


def hold_weight(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace the only weight of a module, on the device where the module runs. It is not offloaded any more."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    device = getattr(module, name).device
    is_offloaded = device.type == "meta"
    if is_offloaded:
        device = torch.device(_hook(module).execution_device)
        remove_hook_from_module(module)
    setattr(module, name, torch.nn.Parameter(value.to(device), requires_grad=False))
    if is_offloaded:
        # The module's inputs must still be moved to the device where it runs.
        add_hook_to_module(module, AlignDevicesHook(execution_device=device))


def _hook(module: torch.nn.Module) -> Any:
    hook = getattr(module, "_hf_hook", None)
    assert hook is not None, "accelerate leaves no weight on meta without a hook that fetches it"
    return hook


_UPGRADE = f"Install the transformers that mm2 knows: {install_command('golden')}"
# Names of the proofs, as the manifest records them.
_PROVED = ("no_fp8_arithmetic", "rotary_width", "float32_router", "weights_match_checkpoint")
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def prove_model(
    model: torch.nn.Module, *, spec: ModelSpec, reader: CheckpointReader, dtype: torch.dtype
) -> tuple[str, ...]:
    """Prove rotary width, float32 router and dequantised weights of a loaded model, offloaded weights too.

    Returns:
        The names of the proofs, as the manifest records them.

    Raises:
        GoldenRefusedError: One of the proofs failed; the trap is named.
    """
    proved = prove_bare_model(model, spec=spec, dtype=dtype)
    for index, layer in enumerate(model.get_submodule("model.layers").children()):
        tensors = LayerTensors.open(reader, spec, index, dtype)
        prove_float32_router(layer, tensors, index, spec=spec)
        prove_weights(layer, tensors, index, spec=spec)
    return proved


def prove_bare_model(model: torch.nn.Module, *, spec: ModelSpec, dtype: torch.dtype) -> tuple[str, ...]:
    """Prove what a model shows without weights. The rest is proved on the first layer that is streamed.

    Returns:
        The same names as `prove_model`, since a golden is the same capture however it was made.

    Raises:
        GoldenRefusedError: One of the proofs failed; the trap is named.
    """
    prove_no_fp8(model)
    prove_dtype(model, dtype, spec=spec)
    prove_rotary_width(model, spec)
    return _PROVED


def refuse_ragged_blocks(spec: ModelSpec) -> None:
    """Refuse an FP8 checkpoint whose blocks transformers would get wrong; no weight is read.

    transformers derives a block's size from the shapes of weight and scales, which is right for whole blocks only.

    Raises:
        GoldenRefusedError: A width is over 128 and no multiple of it.
    """
    if not spec.is_fp8:
        return
    ragged = find_ragged_widths(spec)
    if ragged:
        raise GoldenRefusedError(
            "transformers would dequantise this FP8 checkpoint with wrong blocks",
            expected=f"widths that are multiples of {BLOCK_SIZE}, or less",
            found="; ".join(ragged),
            next_step="Make the golden from a BF16 copy of the model.",
        )


def prove_no_fp8(model: torch.nn.Module) -> None:
    """Raise GoldenRefusedError if the model would compute in FP8: a weight is FP8, or scales of FP8 are loaded."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype in _FP8_DTYPES or name.endswith("_scale_inv"):
            raise GoldenRefusedError(
                f"{name} is held in {tensor.dtype}",
                expected="weights dequantised when loaded",
                found="FP8 matmuls with activation quantisation",
                next_step="Load with FineGrainedFP8Config(dequantize=True), as mm2-gpu does.",
            )


def prove_dtype(model: torch.nn.Module, dtype: torch.dtype, *, spec: ModelSpec) -> None:
    """Raise GoldenRefusedError if a weight has another dtype than requested, a float32 router excepted."""
    in_float32 = tuple(map(spec.family.module_names.stored, float32_names(spec.graph)))
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtype and not name.endswith(in_float32):
            raise GoldenRefusedError(
                f"{name} was loaded in another dtype than was asked for",
                expected=str(dtype),
                found=str(parameter.dtype),
                next_step=_UPGRADE,
            )


def prove_rotary_width(model: torch.nn.Module, spec: ModelSpec) -> None:
    """Raise GoldenRefusedError if the model rotates another width, or by other frequencies, than config.json says."""
    rotary: Any = model.get_submodule("model.rotary_emb")
    found = rotary.inv_freq.to("cpu", torch.float32)
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    expected = 1.0 / spec.rope_theta**exponents
    if found.shape != expected.shape:
        raise GoldenRefusedError(
            "the golden rotates the wrong width",
            expected=f"rotary_dim {spec.rotary_dim}",
            found=f"{2 * found.numel()} of head_dim {spec.head_dim}",
            next_step=_UPGRADE,
        )
    if not torch.allclose(found, expected, rtol=1e-5, atol=0.0) or float(rotary.attention_scaling) != 1.0:
        raise GoldenRefusedError(
            "the golden rotates with the wrong frequencies",
            expected=f"theta {spec.rope_theta:g}, lowest frequency {float(expected[-1]):.3e}, scaling 1",
            found=f"lowest frequency {float(found[-1]):.3e}, scaling {float(rotary.attention_scaling):g}",
            next_step=_UPGRADE,
        )


def prove_float32_router(
    layer: torch.nn.Module, tensors: LayerTensors, index: int, *, spec: ModelSpec
) -> None:
    """Raise GoldenRefusedError if a float32 router is not bit-equal to the checkpoint's values."""
    for name, path, tensor in float32_places(spec, index):
        value = weight_of(layer.get_submodule(path), tensor)
        if value.dtype != torch.float32:
            raise GoldenRefusedError(
                f"layer {index}: {name} was rounded",
                expected="float32, as stored",
                found=str(value.dtype),
                next_step="Rounding it changes the experts of many tokens; load it in float32.",
            )
        if not torch.equal(value.cpu(), tensors[name]):
            raise GoldenRefusedError(
                f"layer {index}: {name} differs from the checkpoint",
                found=f"largest difference {float((value.cpu() - tensors[name]).abs().max()):.3e}",
                next_step="Load it in float32 without rounding.",
            )


def prove_weights(
    layer: torch.nn.Module,
    tensors: LayerTensors,
    index: int,
    *,
    spec: ModelSpec,
    experts: tuple[int, ...] | None = None,
) -> None:
    """Raise GoldenRefusedError if a layer's weights are not the checkpoint's, dequantised in float32 and rounded once.

    All but experts and a float32 router is compared whole. Of the experts only the first and the last are compared: all
    have the same shapes. `experts` are the numbers of the loaded experts; None for all.
    """
    for name, value in _weights(layer, index, spec, experts):
        expected = tensors[name]
        if not torch.equal(value.cpu(), expected):
            raise GoldenRefusedError(
                f"layer {index}: {name} differs from the checkpoint's dequantised weight",
                found=f"largest difference {float((value.cpu() - expected).abs().max()):.3e}",
                next_step="Make the golden from a BF16 copy of the model, and report this.",
            )


def proved_names(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """Return the names, relative to a layer, that its proofs read beside experts; scales too, which not all have."""
    names = [name for name in expected_layer_shapes(spec, layer) if EXPERTS not in name]
    return (*names, *map(scale_name, names))


def proved_expert_names(experts: Sequence[int]) -> tuple[str, ...]:
    """Return the names, relative to a layer, that its proofs read if these experts are loaded; scales too."""
    weights = [expert_weight(expert, name) for expert in _proved_experts(experts) for name in EXPERT_MATRICES]
    return (*weights, *map(scale_name, weights))


def _weights(
    layer: torch.nn.Module, index: int, spec: ModelSpec, loaded: tuple[int, ...] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights to compare, by mm2's names; `loaded` are the numbers of the loaded experts, None for all."""
    for place, names in module_weights(spec, index).items():
        if names[0] in float32_names(spec.graph):
            continue
        path, _, attribute = place.rpartition(".")
        held = weight_of(layer.get_submodule(path), attribute)
        yield from zip(names, held.chunk(len(names)), strict=True)
    if spec.graph.layer(index).is_dense:
        return
    experts = layer.get_submodule("mlp.experts")
    gate_up, down = _matrices(experts, "gate_up_proj"), _matrices(experts, "down_proj")
    loaded = tuple(range(len(down))) if loaded is None else loaded
    for expert in _proved_experts(loaded):
        gate, up = gate_up[expert].chunk(2)
        yield expert_weight(expert, EXPERT_GATE), gate
        yield expert_weight(expert, EXPERT_UP), up
        yield expert_weight(expert, EXPERT_DOWN), down[expert]


def _proved_experts(loaded: Sequence[int]) -> list[int]:
    return sorted({loaded[0], loaded[-1]})


def _matrices(experts: torch.nn.Module, name: str) -> torch.Tensor | PackedMatrices:
    packed = vars(experts).get(name)
    return packed if isinstance(packed, PackedMatrices) else weight_of(experts, name)
