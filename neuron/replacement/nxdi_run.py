"""A run by hand on NxDI with the stream replaced at one point: its files, and the call of a compiled application.

NxDI's tensor replacement reads, for all points and steps, `reference/` with the values: [B·s,H], all prompts' rows one
after another, each padded to the longest; and `shapes/` with zeros of the compiled graph's shapes: [B,C,H] for the
prefill, [B,1,H] for each decoding step. A porter's own script calls `run_replaced` behind `compile` and `load`.
B prompts, s columns of a pass, C columns of the bucket, H hidden, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from minimax_tools.errors import TargetError, UsageError
from minimax_tools.model.inputs import Inputs
from neuron.model_runs.assembly import last_logits
from neuron.model_runs.passes import Pass
from neuron.ports.nxdi_loaded import prefill_arguments, step_arguments
from neuron.ports.nxdi_settings import file_name, map_steps, point_module
from neuron.replacement.run_folder import RunFolder, save_tensors
from neuron.replacement.stream import GoldenStream

REFERENCE, SHAPES = "reference", "shapes"


def write_nxdi_files(folder: RunFolder, stream: GoldenStream) -> None:
    """Write the stream at all points into a folder."""
    plan, passes = folder.plan, folder.passes()
    for name in (REFERENCE, SHAPES):
        (folder.directory / name).mkdir(exist_ok=True)
    for point in range(plan.num_layers + 1):
        states = stream.read(point)
        module = point_module(point, num_layers=plan.num_layers)
        for model_pass in passes:
            _write_step(folder, module, model_pass, model_pass.cut(states))


def refuse_prompts(inputs: Inputs, *, bucket: int) -> None:
    """Refuse prompts that NxDI computes wrongly whatever the port, or that do not fit the bucket."""
    faults = []
    if int(inputs.position_ids[inputs.attention_mask.bool()].min()):
        faults.append("positions that do not begin at 0")
    if inputs.sequence_length > bucket:
        faults.append(f"{inputs.sequence_length} columns for a bucket of {bucket}")
    if faults:
        raise UsageError(
            "NxDI cannot run the golden's prompts",
            expected="prompts from position 0 on, that fit --bucket",
            found="; ".join(faults),
            next_step="Give a larger --bucket, or capture a golden of other prompts.",
        )


def _write_step(folder: RunFolder, module: str, model_pass: Pass, states: torch.Tensor) -> None:
    step = model_pass.number + 1
    batch_size, num_columns, hidden_size = states.shape
    shape = (batch_size, folder.plan.bucket if step == 1 else num_columns, hidden_size)
    name = file_name(module, step=step)
    for place, tensor in (
        (REFERENCE, states.flatten(0, 1).contiguous()),
        # NxDI writes the reference into this tensor: each element needs memory of its own.
        (SHAPES, torch.zeros(shape, dtype=states.dtype)),
    ):
        save_tensors(tensor, folder.directory / place / name)


def replacement_config(neuron_config: Any, folder: str | Path, *, point: int | None) -> Any:
    """Return the TensorReplacementConfig that replaces the stream at a point; None replaces nothing."""
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
