"""Tensor replacement of the stand-in's NxD: hooks that replace what a module returns."""

from __future__ import annotations

import inspect
import types

import torch
from neuronx_distributed.utils.tensor_replacement.registry import RuntimeRegister


def modify_model_for_tensor_replacement(model):
    """Let the model's forward take a tensor and a mask for each module behind its own arguments."""
    names, original = list(RuntimeRegister.module_superset), model.forward
    num_own = len(inspect.signature(original).parameters)

    def forward(_, *arguments):
        given = arguments[num_own:]
        if len(given) != 2 * len(names):
            raise ValueError(f"expected {2 * len(names)} replacement arguments, got {len(given)}")
        RuntimeRegister.tensors = dict(zip(names, given[: len(names)], strict=True))
        RuntimeRegister.masks = dict(zip(names, given[len(names) :], strict=True))
        return original(*arguments[:num_own])

    model.forward = types.MethodType(forward, model)
    hooks = {
        name: module.register_forward_hook(_hook(name))
        for name, module in model.named_modules()
        if name in names
    }
    return model, hooks


def _hook(name):
    def replace(_, __, output):
        # As NxD: a tuple is no tensor, and raises.
        return torch.where(RuntimeRegister.masks[name], RuntimeRegister.tensors[name], output)

    return replace
