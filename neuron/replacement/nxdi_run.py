"""A run by hand on NxDI with the stream replaced at one point: its files, and the call of a compiled application.

`stream/NAME.safetensors` holds the golden's stream at a point, [B,S,H]. A porter's own script calls `run_replaced`
behind `compile` and `load`. B prompts, S columns of the golden's batch, H hidden, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minimax_tools.dumps.tensor_file import read_tensor
from minimax_tools.errors import TargetError, UsageError
from minimax_tools.model.inputs import Inputs
from neuron.model_runs.assembly import last_logits
from neuron.ports.nxdi_stream import pass_arguments, replacement_arguments
from neuron.replacement.run_folder import RunFolder
from neuron.replacement.stream import GoldenStream

_STREAM = "stream"


def write_stream(folder: RunFolder, stream: GoldenStream) -> None:
    """Write the stream at all points into a folder."""
    (folder.directory / _STREAM).mkdir()
    for point in range(folder.plan.num_layers + 1):
        save_file({_STREAM: stream.read(point).contiguous()}, _stream_path(folder, point))


def _stream_path(folder: RunFolder, point: int) -> Path:
    return folder.directory / _STREAM / f"{folder.name_run(point)}.safetensors"


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


def run_replaced(application: Any, folder: str | Path, *, point: int | None) -> Path:
    """Run a loaded application with the stream replaced at a point, and write its logits into the folder.

    Raises:
        TargetError: The application returned no logits, or was built for other sizes.
    """
    opened = RunFolder.open(Path(folder))
    _refuse_other_sizes(application.neuron_config, opened)
    stream = None if point is None else read_tensor(_stream_path(opened, point), (_STREAM,))
    application.reset()
    logits = []
    for model_pass in opened.passes():
        is_prefill = model_pass.number == 0
        arguments = pass_arguments(
            model_pass.input_ids, model_pass.attention_mask, model_pass.position_ids, is_prefill=is_prefill
        )
        replaced = None if point is None or stream is None else (point, model_pass.cut(stream))
        arguments["tf_args"] = replacement_arguments(application.config, replaced, is_prefill=is_prefill)
        with torch.no_grad():
            result = application(**arguments)
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
