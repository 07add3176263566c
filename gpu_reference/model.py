"""The golden model: transformers' own, loaded with the known traps closed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu_reference.placement import Placement, describe_placement
from minimax_tools.errors import CheckpointError, MissingExtraError
from minimax_tools.reference.modules import read_config, recording_attention, require_golden_extra
from minimax_tools.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
ATTN_IMPLEMENTATIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenModelRequest:
    """How to load the golden model.

    Args:
        folder: The checkpoint.
        spec: Its quantities.
        num_hidden_layers: How many of its first layers to load.
        dtype: Dtype of weights and activations; the router stays float32.
        placement: Which device holds what.
        attn_implementation: transformers' attention implementation.
        experts_implementation: transformers' experts implementation.
    """

    folder: Path
    spec: ModelSpec
    num_hidden_layers: int
    dtype: torch.dtype
    placement: Placement
    attn_implementation: str
    experts_implementation: str


def load_golden_model(request: GoldenModelRequest) -> PreTrainedModel:
    """Load transformers' MiniMax-M2: FP8 dequantised, router gate and correction bias kept in float32.

    Raises:
        MissingExtraError: transformers or accelerate is missing, or too old to know MiniMax-M2.
        CheckpointError: transformers could not load the checkpoint.
    """
    require_golden_extra("a golden capture")
    _set_exact_arithmetic()
    model_class = _golden_class()
    logger.info("Loading %d layers of %s in %s.", request.num_hidden_layers, request.folder, request.dtype)
    try:
        model = model_class.from_pretrained(
            request.folder,
            config=read_config(request.folder, num_hidden_layers=request.num_hidden_layers),
            dtype=request.dtype,
            attn_implementation=recording_attention(request.attn_implementation),
            experts_implementation=request.experts_implementation,
            **_quantization(request.spec),
            **request.placement.loading_arguments(),
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"transformers cannot load {request.folder}", found=f"{type(error).__name__}: {error}"
        ) from error
    for line in describe_placement(model):
        logger.info("  %s", line)
    golden: PreTrainedModel = model.eval()
    return golden


def _golden_class() -> Any:
    try:
        from transformers import MiniMaxM2ForCausalLM
    except ImportError:
        raise MissingExtraError("transformers>=5.23", extra="golden", needed_for="a golden capture") from None

    class GoldenMiniMaxM2ForCausalLM(MiniMaxM2ForCausalLM):
        """transformers' class; loading in BF16 would otherwise round the router's gate and correction bias."""

        _keep_in_fp32_modules_strict = ["mlp.gate", "e_score_correction_bias"]  # noqa: RUF012 - the base's type

    # transformers reads the source of a model's module to learn whether its implementations can be chosen.
    GoldenMiniMaxM2ForCausalLM.__module__ = MiniMaxM2ForCausalLM.__module__
    return GoldenMiniMaxM2ForCausalLM


def _quantization(spec: ModelSpec) -> dict[str, Any]:
    """On a GPU of capability 8.9 or more an FP8 checkpoint would otherwise run FP8 matmuls."""
    if "quantization_config" not in spec.raw:
        return {}
    from transformers import FineGrainedFP8Config

    stored = spec.raw["quantization_config"]
    return {
        "quantization_config": FineGrainedFP8Config(
            dequantize=True,
            weight_block_size=tuple(stored.get("weight_block_size", (128, 128))),
            modules_to_not_convert=stored.get("modules_to_not_convert"),
        )
    }


def _set_exact_arithmetic() -> None:
    """No TF32: the golden's float32 parts are float32."""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]  # missing in torch's stubs
