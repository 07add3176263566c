"""Tensor capture: hooks that hand the tensors of named modules to the registry."""

from __future__ import annotations

from neuronx_distributed.utils.tensor_capture.registry import TensorRegistry


def enable_tensor_capture(model, modules_to_capture=None, max_tensors=None, capture_inputs=False):
    """Hook the named modules; each must exist."""
    present = dict(model.named_modules())
    missing = [name for name in modules_to_capture if name not in present]
    if missing:
        raise ValueError(f"modules not found: {missing}")
    TensorRegistry.get_instance().configure(
        enabled=True, modules=modules_to_capture, max_tensors=max_tensors, capture_inputs=capture_inputs
    )
    for name in modules_to_capture:
        present[name].register_forward_hook(_hook(name), with_kwargs=True)
    return model


def _hook(name):
    def keep(_, inputs, keywords, output):
        registry = TensorRegistry.get_instance()
        registry.keep(name, "input", (*inputs, *keywords.values()))
        registry.keep(name, "output", output if isinstance(output, tuple) else (output,))

    return keep
