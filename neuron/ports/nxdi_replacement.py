"""NxDI's tensor replacement: the files that its config reads, and the arguments of a pass.

`TensorReplacementConfig(ref_dir=, neuron_dir=, tf_map=, neuron_config=)` reads one file for each module and step from
both folders. `neuron_dir` gives the shape that the compiled graph has, `ref_dir` the values and their dtype. Step 1 is
the prefill, each later one a decoding step. A compiled graph takes the tensors of all modules that `tf_map` names in
any step, and a mask for each: so it is compiled once for all points, if a step that never comes names them all.
Read in NxDI 0.9 and NxD 0.18.
B prompts, S columns of the pass, C columns of the bucket, H hidden.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from neuron.ports.nxdi_points import list_point_modules, point_module

# A step that no run comes to: naming all modules for it puts them in the graph, in this order.
NO_STEP = 0
PREFILL_STEP = 1
# The prefill, and one decoding step, whose shape all decoding steps have.
_STEPS = (PREFILL_STEP, 2)


def file_name(module: str, *, step: int) -> str:
    """Return the name by which NxDI finds a module's output in a step."""
    phase = "cte" if step == PREFILL_STEP else "tkg"
    return f"captured_tensors_{phase}_step_{step}_module_{module}_output.pt"


def map_steps(point: int | None, *, num_layers: int, num_steps: int) -> Mapping[int, list[str]]:
    """Return the `tf_map` that replaces the stream at a point in all steps, nowhere for None."""
    replaced = [] if point is None else [point_module(point, num_layers=num_layers)]
    steps = range(PREFILL_STEP, num_steps + 1)
    return {NO_STEP: list_point_modules(num_layers), **{step: list(replaced) for step in steps}}


def make_config(neuron_config: Any, *, num_layers: int, hidden_size: int) -> Any:
    """Return the TensorReplacementConfig of a graph whose stream can be replaced at all points.

    Its files hold zeros: `replacement_arguments` gives each pass its own values.
    """
    from neuronx_distributed_inference.models.config import TensorReplacementConfig
    from neuronx_distributed_inference.utils.tensor_replacement.registry import TensorReplacementRegister

    batch_size, dtype = neuron_config.batch_size, neuron_config.torch_dtype
    with tempfile.TemporaryDirectory(prefix="mm2_nxdi_") as folder:
        reference, shapes = Path(folder, "reference"), Path(folder, "shapes")
        for directory in (reference, shapes):
            directory.mkdir()
        for step in _STEPS:
            num_columns = neuron_config.max_context_length if step == PREFILL_STEP else 1
            zeros = torch.zeros(batch_size, num_columns, hidden_size, dtype=dtype)
            for module in list_point_modules(num_layers):
                torch.save(zeros, shapes / file_name(module, step=step))
                torch.save(zeros.flatten(0, 1), reference / file_name(module, step=step))
        # A process has one register: that of an application before would be taken.
        TensorReplacementRegister.clear()
        return TensorReplacementConfig(
            ref_dir=str(reference),
            neuron_dir=str(shapes),
            tf_map=dict(map_steps(None, num_layers=num_layers, num_steps=len(_STEPS))),
            # NxDI saves the config that gets this one: within itself it would have no end.
            neuron_config=copy.deepcopy(neuron_config),
        )


def replacement_arguments(
    point: int | None,
    states: torch.Tensor | None,
    *,
    num_layers: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return the `tf_args` of a pass: a tensor of `shape` for each point, and then a mask [1] for each.

    `states` [B,S,H] replace the stream at `point`; padding behind them is zero. With None, nothing is replaced.
    """
    nothing = torch.zeros(shape, dtype=dtype)
    tensors = [nothing] * (num_layers + 1)
    masks = [torch.zeros(1, dtype=torch.bool) for _ in tensors]
    if point is not None and states is not None:
        padded = nothing.clone()
        padded[:, : states.shape[1]] = states.to(device="cpu", dtype=dtype)
        tensors[point] = padded
        masks[point] = torch.ones(1, dtype=torch.bool)
    return [*tensors, *masks]
