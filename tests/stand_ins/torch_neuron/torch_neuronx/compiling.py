"""The backend `neuron` of torch.compile: AOTAutograd gives it a graph of aten operations, which it runs as it is.

TorchNeuron's refuses dynamic shapes, and so does this one.
"""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Give the backend to torch.compile."""
    from torch._dynamo.backends.registry import register_backend

    register_backend(compiler_fn=_compile, name="neuron")


def _compile(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    if any(isinstance(value, torch.SymInt) for value in inputs):
        raise RuntimeError("Neuron backend: dynamic shapes are not supported")
    compiler = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward))
    return compiler(graph, inputs)
