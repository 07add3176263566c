"""A run by hand on NxDI: a compiled application, called with the stream replaced at one point.

A porter's own script calls `run_replaced` behind `compile` and `load`. The values and masks are those that NxDI's
register reads from the folder.
B prompts, s columns of a pass, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from minimax_tools.errors import TargetError
from neuron.model_runs.assembly import last_logits
from neuron.ports.nxdi_loaded import prefill_arguments, step_arguments
from neuron.ports.nxdi_settings import map_steps
from neuron.replacement.nxdi_files import REFERENCE, SHAPES
from neuron.replacement.run_folder import RunFolder


def replacement_config(neuron_config: Any, folder: str | Path, *, point: int | None) -> Any:
    """Return the TensorReplacementConfig that replaces the stream at a point; None replaces nothing.

    Raises:
        TargetError: The config has another batch size or bucket than the folder.
        CaptureError: The folder was not written by mm2-test replacement.
    """
    from neuronx_distributed_inference.models.config import TensorReplacementConfig
    from neuronx_distributed_inference.utils.tensor_replacement.registry import TensorReplacementRegister

    opened = RunFolder.open(Path(folder))
    _refuse_other_sizes(neuron_config, opened)
    # A process has one register: it would keep the point of the run before.
    TensorReplacementRegister.clear()
    plan = opened.plan
    return TensorReplacementConfig(
        ref_dir=str(opened.directory / REFERENCE),
        neuron_dir=str(opened.directory / SHAPES),
        tf_map=dict(map_steps(point, num_layers=plan.num_layers, num_steps=plan.num_steps)),
        # It may hold a config of this kind already: NxDI's register reads sizes alone.
        neuron_config=neuron_config,
    )


def run_replaced(application: Any, folder: str | Path, *, point: int | None) -> Path:
    """Run a loaded application with the stream replaced at a point, and write its logits into the folder.

    Raises:
        TargetError: The application returned no logits, or was built for other sizes.
        CaptureError: The folder was not written by mm2-test replacement, or cannot be written.
    """
    from neuronx_distributed_inference.utils.tensor_replacement.registry import TensorReplacementRegister

    replacement_config(application.neuron_config, folder, point=point)
    register = TensorReplacementRegister.get_instance()
    opened = RunFolder.open(Path(folder))
    application.reset()
    logits = []
    for model_pass in opened.passes():
        ids, positions = model_pass.input_ids, model_pass.position_ids
        arguments = (
            step_arguments(ids, positions)
            if model_pass.number
            else prefill_arguments(ids, model_pass.attention_mask, positions)
        )
        tensors, masks = register.step_args(model_pass.number + 1)
        with torch.no_grad():
            result = application(**arguments, tf_args=[*tensors, *masks])
        found = getattr(result, "logits", None)
        if not isinstance(found, torch.Tensor) or found.ndim != 3:
            raise TargetError(
                f"{type(application).__name__} returned no logits",
                expected="logits [B,1,V] or [B,S,V]",
                found=str(list(found.shape)) if isinstance(found, torch.Tensor) else type(found).__name__,
                next_step="Set output_logits=True in the NeuronConfig.",
            )
        logits.append(last_logits(model_pass, found))
    return opened.write_logits(point, torch.stack(logits, dim=1))


def _refuse_other_sizes(neuron_config: Any, folder: RunFolder) -> None:
    inputs = folder.read_inputs()
    expected = {
        "batch_size": inputs.batch_size,
        "max_context_length": folder.plan.bucket,
        "enable_bucketing": False,
        "padding_side": "right",
        "sequence_parallel_enabled": False,
    }
    # Options that an older NxDI lacks cannot be set otherwise.
    found = {name: getattr(neuron_config, name, value) for name, value in expected.items()}
    differing = [name for name in expected if found[name] != expected[name]]
    if differing:
        raise TargetError(
            f"the NeuronConfig does not fit {folder.directory}",
            expected=", ".join(f"{name}={expected[name]!r}" for name in differing),
            found=", ".join(f"{name}={found[name]!r}" for name in differing),
            next_step="Build the application with these options.",
        )
