"""The stream of an application on NxDI, replaced by NxDI's tensor replacement.

NxDI replaces what a module returns, if that is one tensor. A decoder layer returns a tuple, so a point is a module of
its own, which returns what it is given: `layers.3.stream` for the input of layer 3, `norm.stream` for that of the final
norm. A compiled graph takes a tensor and a mask for each of them in every pass: so it is compiled once for all points.
Read in NxDI 0.9 and NxD 0.18. B prompts, S columns of the pass, C columns of the bucket, H hidden.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minimax_tools.errors import TargetError

_POINT = "stream"
# Usual name of the argument that holds the stream; another name is that of the first tensor.
_STATES = "hidden_states"
# Argument of a layer that holds a summand of its input, where a kernel adds both.
_RESIDUAL = "residual"
# A point, a layer's number or the number of layers, and states [B,S,H] that replace the stream there.
ReplacedStream = tuple[int, torch.Tensor]


def list_points(num_layers: int) -> list[str]:
    """Return the names of the modules at all points, in order."""
    return [*(f"layers.{layer}.{_POINT}" for layer in range(num_layers)), f"norm.{_POINT}"]


def add_stream_points(model: nn.Module) -> None:
    """Add a point before each of `model.layers`, and before `model.norm`; call it at the end of `init_model`."""
    layers, norm = getattr(model, "layers", None), getattr(model, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module):
        raise TargetError(
            f"{type(model).__name__} has no stream to replace",
            expected="the submodules `layers` and `norm`, as models of NxDI have them",
            next_step="Call add_stream_points at the end of init_model, behind those.",
        )
    for module in (*layers, norm):
        module.add_module(_POINT, nn.Identity())
        module.register_forward_pre_hook(_pass_point, with_kwargs=True)


def with_stream_points(application_class: Any) -> Any:
    """Return the class of an application whose model has points."""
    model_class = application_class._model_cls

    def init_model(self: nn.Module, config: Any) -> None:
        model_class.init_model(self, config)
        add_stream_points(self)

    pointed = type(model_class.__name__, (model_class,), {"init_model": init_model})
    return type(application_class.__name__, (application_class,), {"_model_cls": pointed})


def _pass_point(
    module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if keywords.get(_RESIDUAL) is not None:
        raise TargetError(
            f"{type(module).__name__} is given its input as two summands, which cannot be replaced together",
            found=f"a tensor as `{_RESIDUAL}`",
            next_step="Leave out qkv_kernel_fuse_residual_add of the port's NeuronConfig.",
        )
    point = module.get_submodule(_POINT)
    if inputs:
        return (point(inputs[0]), *inputs[1:]), keywords
    tensors = [name for name, value in keywords.items() if isinstance(value, torch.Tensor)]
    name = _STATES if _STATES in tensors else tensors[0]
    return inputs, {**keywords, name: point(keywords[name])}


# The steps that files are named by: the prefill, and one decoding step, whose shape all decoding steps have.
_STEPS = {1: "cte", 2: "tkg"}
# A step that no run comes to: naming all modules for it puts them in the graph, in this order.
_NO_STEP = 0


def stream_replacement(neuron_config: Any, *, num_layers: int, hidden_size: int) -> Any:
    """Return the TensorReplacementConfig of a graph whose stream can be replaced at all points.

    NxDI reads the graph's shapes from `neuron_dir`, and values from `ref_dir`. These are zeros:
    `replacement_arguments` gives each pass its own.
    """
    from neuronx_distributed_inference.models.config import TensorReplacementConfig
    from neuronx_distributed_inference.utils.tensor_replacement.registry import TensorReplacementRegister

    points = list_points(num_layers)
    with tempfile.TemporaryDirectory(prefix="mm2_nxdi_") as folder:
        values, shapes = Path(folder, "values"), Path(folder, "shapes")
        for directory in (values, shapes):
            directory.mkdir()
        for step, phase in _STEPS.items():
            num_columns = neuron_config.max_context_length if phase == "cte" else 1
            zeros = torch.zeros(
                neuron_config.batch_size, num_columns, hidden_size, dtype=neuron_config.torch_dtype
            )
            for module in points:
                name = f"captured_tensors_{phase}_step_{step}_module_{module}_output.pt"
                torch.save(zeros, shapes / name)
                torch.save(zeros.flatten(0, 1), values / name)
        # A process has one register: that of an application before would be taken.
        TensorReplacementRegister.clear()
        return TensorReplacementConfig(
            ref_dir=str(values),
            neuron_dir=str(shapes),
            tf_map={_NO_STEP: points, **{step: [] for step in _STEPS}},
            # NxDI saves the config that gets this one: within itself it would have no end.
            neuron_config=copy.deepcopy(neuron_config),
        )


def replacement_arguments(
    config: Any, replaced: ReplacedStream | None, *, is_prefill: bool
) -> list[torch.Tensor]:
    """Return the `tf_args` of a pass: a tensor [B,C,H] or [B,1,H] for each point, and then a mask [1] for each.

    Args:
        config: NxDI's config of the model.
        replaced: The point, and its states; padding behind these is zero. None to replace nothing.
        is_prefill: Whether the pass is a prefill, padded to its bucket.
    """
    neuron_config = config.neuron_config
    num_columns = neuron_config.max_context_length if is_prefill else 1
    shape = (neuron_config.batch_size, num_columns, config.hidden_size)
    nothing = torch.zeros(shape, dtype=neuron_config.torch_dtype)
    tensors = [nothing] * (config.num_hidden_layers + 1)
    masks = [torch.zeros(1, dtype=torch.bool) for _ in tensors]
    if replaced is not None:
        point, states = replaced
        tensors[point] = nothing.clone()
        tensors[point][:, : states.shape[1]] = states.to("cpu")
        masks[point] = torch.ones(1, dtype=torch.bool)
    return [*tensors, *masks]


def pass_arguments(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor, *, is_prefill: bool
) -> dict[str, Any]:
    """Return the arguments by which an application prefills prompts [B,S], padded on the right, or computes [B,1].

    Padding of a prefill has the position 1. A step's mask holds the cached positions, not its own.
    """
    if is_prefill:
        position_ids = torch.where(attention_mask.bool(), position_ids, 1)
    else:
        cached = torch.arange(int(position_ids.max())) < position_ids
        attention_mask = cached.to(input_ids.dtype)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "seq_ids": torch.arange(len(input_ids)),
        # Top k, top p and temperature, which a greedy sampler does not read.
        "sampling_params": torch.ones(len(input_ids), 3),
    }
