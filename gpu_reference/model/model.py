"""The golden model: transformers' own, loaded so that it falls into none of the known traps."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu_reference.model.model_checks import hold_weight
from gpu_reference.model.placement import Placement, describe_placement, verify_device_map, watched_memory
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError, MissingExtraError, UsageError
from minimax_tools.machine.importing import importing
from minimax_tools.model.quantisation import BLOCK_SIZE
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import CORRECTION_BIAS, float32_places, layer_prefix
from minimax_tools.reference.modules import (
    loading_arguments,
    modeling_class,
    read_config,
    require_golden_extra,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenModelRequest:
    """A golden model to load."""

    folder: Path
    spec: ModelSpec
    num_hidden_layers: int  # number of layers to load, from the first on
    dtype: torch.dtype  # dtype of weights and activations; a float32 router stays so
    placement: Placement  # devices that hold the parts of the model
    attn_implementation: str
    experts_implementation: str


def load_golden_model(request: GoldenModelRequest, reader: CheckpointReader) -> PreTrainedModel:
    """Load transformers' model, with FP8 dequantised, and a float32 router as stored.

    Raises:
        MissingExtraError: transformers or accelerate is missing, or too old to know the model.
        UsageError: The device map does not fit the model, or the model the devices.
        CheckpointError: transformers could not load the checkpoint.
    """
    require_golden_extra("a golden capture")
    _set_exact_arithmetic()
    logger.info("Loading %d layers of %s in %s.", request.num_hidden_layers, request.folder, request.dtype)
    model_class = _golden_class(request.spec)
    with _following_quiet(), _loading_errors_translated(request), watched_memory():
        with torch.device("meta"):
            verify_device_map(request.placement.device_map, model_class(_read_config(request)))
        model = model_class.from_pretrained(
            request.folder,
            config=_read_config(request),
            dtype=request.dtype,
            attn_implementation=request.attn_implementation,
            experts_implementation=request.experts_implementation,
            **_quantization(request.spec),
            **loading_arguments(request.spec.family),
            **request.placement.loading_arguments(),
        )
    _cast_weights(model, request.dtype)
    restore_router(model, reader, request.spec)  # the cast has rounded it too
    for line in describe_placement(model):
        logger.info("  %s", line)
    golden: PreTrainedModel = model.eval()
    return golden


def build_golden_model(request: GoldenModelRequest, *, device: torch.device) -> PreTrainedModel:
    """Build transformers' model for streaming: its weights are on the meta device, to be bound layer by layer.

    A float32 router is float32, and the rotary embedding is on `device`.

    Raises:
        MissingExtraError: transformers or accelerate is missing, or too old to know the model.
    """
    require_golden_extra("a golden capture")
    _set_exact_arithmetic()
    model_class, config = _golden_class(request.spec), _read_config(request)
    with torch.device("meta"):
        model = model_class._from_config(
            config,
            dtype=request.dtype,
            attn_implementation=request.attn_implementation,
            experts_implementation=request.experts_implementation,
        )
    model.requires_grad_(False)
    for index, layer in enumerate(model.model.layers):
        for _, path, tensor in float32_places(request.spec, index):
            owner = layer.get_submodule(path)
            setattr(owner, tensor, _cast(getattr(owner, tensor), torch.float32))
    # The rotary embedding has frequencies, not weights. As in from_pretrained, they are computed on the CPU.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    # As from_pretrained does; `placement` reads from it where the model runs. "" is the whole model.
    model.hf_device_map = {"": str(device)}
    golden: PreTrainedModel = model.eval()
    return golden


def restore_router(model: torch.nn.Module, reader: CheckpointReader, spec: ModelSpec) -> None:
    """Restore the checkpoint's float32 router gates and correction biases, which loading in BF16 rounded."""
    for index, layer in enumerate(model.get_submodule("model.layers").children()):
        for name, path, tensor in float32_places(spec, index):
            owner = layer.get_submodule(path)
            value = reader.read_weight(layer_prefix(index) + name, torch.float32)
            if name == CORRECTION_BIAS:
                setattr(owner, tensor, value.to(owner.get_buffer(tensor).device))
            else:
                hold_weight(owner, tensor, value)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a parameter or buffer in another dtype, of the same kind."""
    cast = tensor.detach().to(dtype)
    return torch.nn.Parameter(cast, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else cast


@contextmanager
def _loading_errors_translated(request: GoldenModelRequest) -> Iterator[None]:
    """Translate transformers' errors in the block: it asks for an offload folder if the model does not fit."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        if "offload_folder" in str(error):
            raise UsageError(
                "the model does not fit the devices and limits given",
                next_step="Give --offload-folder DIR too.",
            ) from error
        raise CheckpointError(
            f"transformers cannot load {request.folder}", found=f"{type(error).__name__}: {error}"
        ) from error


def _read_config(request: GoldenModelRequest) -> PretrainedConfig:
    # Read anew for each model, because a model writes into its config.
    return read_config(request.folder, num_hidden_layers=request.num_hidden_layers)


def _cast_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast every weight; transformers 5.23 leaves unquantised weights of an FP8 checkpoint in BF16."""
    for parameter in model.parameters():
        if parameter.dtype != dtype:
            # An offloaded weight is cast to the dtype of its placeholder when it is fetched.
            parameter.data = parameter.data.to(dtype)


def _golden_class(spec: ModelSpec) -> Any:
    try:
        with importing():
            return modeling_class(spec.family, "ForCausalLM")
    except ImportError:
        raise MissingExtraError("transformers>=5.23", extra="golden", needed_for="a golden capture") from None


@contextmanager
def _following_quiet() -> Iterator[None]:
    """Show transformers' progress bars and its report of the weights in the block only if mm2's progress is shown.

    The report is no check that mm2 needs: `prove_model` compares the loaded weights with the checkpoint's.
    """
    from transformers.utils import logging as transformers_logging

    if logger.isEnabledFor(logging.INFO):
        transformers_logging.enable_progress_bar()
        yield
        return
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _quantization(spec: ModelSpec) -> dict[str, Any]:
    """Return arguments that dequantise FP8; a GPU of capability 8.9 or more would run FP8 matmuls otherwise."""
    if not spec.is_fp8:
        return {}
    from transformers import FineGrainedFP8Config

    stored = spec.raw["quantization_config"]
    return {
        "quantization_config": FineGrainedFP8Config(
            dequantize=True,
            weight_block_size=tuple(stored.get("weight_block_size") or (BLOCK_SIZE, BLOCK_SIZE)),
            modules_to_not_convert=stored.get("modules_to_not_convert"),
        )
    }


def _set_exact_arithmetic() -> None:
    """Switch off TF32 and BF16 sums: the golden rounds only where a tensor is stored."""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # The old flag, because torch.export on torch 2.13 fails once one of cuDNN's newer flags, which are per kind of
    # operator, was set. torch 2.9.0 asks for the newer ones in a warning; 2.9.1 does not.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        torch.backends.cudnn.allow_tf32 = False
