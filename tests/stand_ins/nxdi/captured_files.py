"""Files of the stand-in's tensor capture, named as NxDI names them."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def get_tensor_capture_hook(capture_indices=None, tensor_capture_save_dir="captured_tensors"):
    """Return a hook that writes the tensors of a pass."""

    def write(application, tensors):
        application.step += 1
        phase = "cte" if application.step == 1 else "tkg"
        directory = Path(tensor_capture_save_dir)
        directory.mkdir(exist_ok=True)
        names = application.neuron_config.tensor_capture_config.modules_to_capture
        places = [(name, point) for name in names for point in ("output", "input")]
        metadata = {}
        for (name, point), tensor in zip(places, tensors, strict=True):
            file = f"captured_tensors_{phase}_step_{application.step}_module_{name}_{point}.pt"
            torch.save(tensor, directory / file)
            metadata[file] = {"module_name": name, "tensor_type": point}
        (directory / "capture_metadata.json").write_text(json.dumps({"tensors": metadata}))

    return write


def list_capturable_modules_in_application(application):
    """Return the names of the modules of each stage."""
    module = application._model_cls(application.config)
    return {"context_encoding_model": [name for name, _ in module.named_modules() if name]}
