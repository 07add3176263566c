"""Points of a model on NxDI at which NxDI's tensor replacement can replace its stream.

NxDI replaces what a module returns, if that is one tensor. A decoder layer returns a tuple, so its output cannot be
replaced. A point is a module of its own, which returns what it is given: `layers.3.stream` for the input of layer 3,
`norm.stream` for the input of the final norm. It has no weights, and adds nothing to the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minimax_tools.errors import TargetError

_POINT = "stream"
# Usual name of the argument that holds the stream; another name is that of the first tensor.
_STATES = "hidden_states"
# Argument of a layer that holds a summand of its input, where a kernel adds both.
_RESIDUAL = "residual"


def point_module(point: int, *, num_layers: int) -> str:
    """Return the name of the module at a point: a layer's number, or the number of layers."""
    return f"norm.{_POINT}" if point == num_layers else f"layers.{point}.{_POINT}"


def list_point_modules(num_layers: int) -> list[str]:
    """Return the names of the modules at all points, in order."""
    return [point_module(point, num_layers=num_layers) for point in range(num_layers + 1)]


def add_stream_points(model: nn.Module) -> None:
    """Add a point before each of `model.layers`, and before `model.norm`; call it at the end of `init_model`.

    Raises:
        TargetError: The model has no `layers` or no `norm`.
    """
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
