"""Files of a golden's stream as NxDI's tensor replacement reads them, at all points and steps.

`reference/` holds the values: [B·s,H], the rows of all prompts one after another, each padded to the longest.
`shapes/` holds zeros of the compiled graph's shapes: [B,C,H] for the prefill, [B,1,H] for each decoding step.
B prompts, s columns of a pass, C columns of the bucket, H hidden.
"""

from __future__ import annotations

from pathlib import Path

import torch

from minimax_tools.errors import UsageError
from minimax_tools.machine.files import whole_capture_file
from minimax_tools.model.inputs import Inputs
from neuron.model_runs.passes import Pass
from neuron.ports.nxdi_settings import file_name, point_module
from neuron.replacement.run_folder import RunFolder
from neuron.replacement.stream import GoldenStream

REFERENCE, SHAPES = "reference", "shapes"


def write_nxdi_files(folder: RunFolder, stream: GoldenStream) -> None:
    """Write the stream at all points into a folder.

    Raises:
        CaptureError: The golden cannot be read, or the folder not be written.
    """
    plan, passes = folder.plan, folder.passes()
    for name in (REFERENCE, SHAPES):
        (folder.directory / name).mkdir(exist_ok=True)
    for point in range(plan.num_layers + 1):
        states = stream.read(point)
        module = point_module(point, num_layers=plan.num_layers)
        for model_pass in passes:
            _write_step(folder, module, model_pass, model_pass.cut(states))


def refuse_prompts(inputs: Inputs, *, bucket: int) -> None:
    """Refuse prompts that NxDI computes wrongly whatever the port, or that do not fit the bucket.

    Raises:
        UsageError: Prompts begin at another position than 0, or are too long.
    """
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
        _save(tensor, folder.directory / place / name)


def _save(tensor: torch.Tensor, path: Path) -> None:
    with whole_capture_file(path) as temporary:
        torch.save(tensor, temporary)
