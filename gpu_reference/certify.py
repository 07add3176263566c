"""Certification: proves that a loaded golden model fell into none of the known traps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.names import CORRECTION_BIAS, GATE, Q_PROJ
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import GoldenRefusedError
from minimax_tools.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UPGRADE = "Install transformers 5.23 or newer: pip install 'mm2[golden]'."


def certify(model: PreTrainedModel, *, spec: ModelSpec, reader: CheckpointReader) -> tuple[str, ...]:
    """Prove the rotary width, the float32 router and the dequantised weights of `model`.

    Returns:
        The names of what was proved, as they are recorded in the manifest.

    Raises:
        GoldenRefusedError: One of the proofs failed; the trap is named.
    """
    prove_no_fp8(model)
    prove_rotary_width(model, spec)
    for index, layer in enumerate(model.get_submodule("model.layers").children()):
        tensors = LayerTensors.open(reader, spec, index, torch.float32)
        prove_float32_router(layer, tensors, index)
        prove_weights(layer, LayerTensors.open(reader, spec, index, model.dtype), index)
    return ("no_fp8_arithmetic", "rotary_width", "float32_router", "weights_match_checkpoint")


def prove_no_fp8(model: torch.nn.Module) -> None:
    """Refuse a model that would compute in FP8."""
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise GoldenRefusedError(
                f"{name} is held in {parameter.dtype}",
                expected="weights dequantised when loaded",
                found="FP8 matmuls with activation quantisation",
                next_step="Load with FineGrainedFP8Config(dequantize=True), as mm2-gpu does.",
            )


def prove_rotary_width(model: torch.nn.Module, spec: ModelSpec) -> None:
    """Refuse a model that rotates another width, or with other frequencies, than config.json says."""
    rotary = model.get_submodule("model.rotary_emb")
    found = torch.as_tensor(rotary.inv_freq).to("cpu", torch.float32)
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    expected = 1.0 / spec.rope_theta**exponents
    if found.shape != expected.shape:
        raise GoldenRefusedError(
            "the golden rotates the wrong width",
            expected=f"rotary_dim {spec.rotary_dim}",
            found=f"{2 * found.numel()} of head_dim {spec.head_dim}",
            next_step=_UPGRADE,
        )
    if not torch.allclose(found, expected, rtol=1e-5, atol=0.0):
        raise GoldenRefusedError(
            "the golden rotates with the wrong frequencies",
            expected=f"theta {spec.rope_theta:g}",
            found=f"lowest frequency {float(found[-1]):.3e} instead of {float(expected[-1]):.3e}",
            next_step=_UPGRADE,
        )


def prove_float32_router(layer: torch.nn.Module, tensors: LayerTensors, index: int) -> None:
    """Refuse a layer whose gate or correction bias is not the checkpoint's float32 value, bit for bit."""
    moe = layer.get_submodule("mlp")
    loaded = {GATE: moe.get_submodule("gate").weight, CORRECTION_BIAS: moe.e_score_correction_bias}
    for name, value in loaded.items():
        if isinstance(value, torch.Tensor) and not value.is_meta:
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


def prove_weights(layer: torch.nn.Module, tensors: LayerTensors, index: int) -> None:
    """Refuse a layer whose weights are not the checkpoint's, dequantised in float32 and rounded once.

    q_proj is compared whole; of the experts the first and the last. Offloaded weights are not looked at.
    """
    experts = layer.get_submodule("mlp.experts")
    last = int(experts.num_experts) - 1
    pairs = {Q_PROJ: layer.get_submodule("self_attn.q_proj").weight}
    if not experts.gate_up_proj.is_meta:
        for expert in (0, last):
            gate, up = experts.gate_up_proj[expert].chunk(2)
            prefix = f"block_sparse_moe.experts.{expert}."
            pairs[prefix + "w1.weight"], pairs[prefix + "w3.weight"] = gate, up
            pairs[prefix + "w2.weight"] = experts.down_proj[expert]
    for name, value in pairs.items():
        if isinstance(value, torch.Tensor) and not value.is_meta and not torch.equal(value.cpu(), tensors[name]):
            raise GoldenRefusedError(
                f"layer {index}: {name} differs from the checkpoint's dequantised weight",
                next_step="FP8 dimensions over 128 must be multiples of 128, or transformers derives wrong blocks.",
            )
