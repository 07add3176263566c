"""The lines that a porter pastes to make one run by hand, complete for the folder and the point."""

from __future__ import annotations

import json

from minimax_tools.results.probes import Point, name_point
from neuron.replacement.nxdi_files import REFERENCE, SHAPES
from neuron.replacement.run_folder import RunFolder
from neuron.replacement.vllm_neuron_files import TOKENS_NAME, tensors_name


def nxdi_instructions(folder: RunFolder, point: Point) -> str:
    """Return the lines for NxDI: the points, the config of the compiled graph, and the run."""
    directory, plan = folder.directory.resolve(), folder.plan
    batch_size = folder.read_inputs().batch_size
    return f"""\
# 1. Once, in the port's model (its NeuronBaseModel), as the last line of init_model:
from neuron.ports.nxdi_settings import add_stream_points
add_stream_points(self)

# 2. Once: options of the NeuronConfig, and the replacement, before the application is built, compiled and loaded.
#    The graph is compiled once for all points.
#      batch_size={batch_size}, max_context_length={plan.bucket}, enable_bucketing=False, padding_side="right",
#      output_logits=True, sequence_parallel_enabled=False, seq_len at least {plan.bucket + plan.num_decoded}
import copy
from neuronx_distributed_inference.models.config import TensorReplacementConfig
from neuron.ports.nxdi_settings import map_steps
neuron_config.tensor_replacement_config = TensorReplacementConfig(
    ref_dir={str(directory / REFERENCE)!r},
    neuron_dir={str(directory / SHAPES)!r},
    tf_map=map_steps({point!r}, num_layers={plan.num_layers}, num_steps={plan.num_steps}),
    neuron_config=copy.deepcopy(neuron_config),
)

# 3. Each run, behind application.compile(…) and application.load(…): {_word_run(folder, point)}.
from neuron.replacement.nxdi_run import run_replaced
run_replaced(application, {str(directory)!r}, point={point!r})  # writes {_word_logits(folder, point)}
"""


def vllm_neuron_instructions(folder: RunFolder, point: Point) -> str:
    """Return the lines for vLLM Neuron: the points, the engine's options, and the run."""
    directory, plan = folder.directory.resolve(), folder.plan
    options = {
        "neuron_config": {
            "tensor_replacement": {
                "tensors_path": str(directory / tensors_name(folder, point)),
                "prompt_token_ids_path": str(directory / TOKENS_NAME),
            },
            "max_logprobs": -1,
        }
    }
    return f"""\
# 1. Once, in the port's model: before each layer, by its number i from 0, and before the final norm. With ranks that
#    divide the tokens of a prefill add rank=…; with a stream of two summands take replace_summands.
from neuron.ports.vllm_neuron_stream import point_name, replace_stream
hidden_states = replace_stream(hidden_states, point_name(i, num_layers={plan.num_layers}))
hidden_states = replace_stream(hidden_states, point_name({plan.num_layers}, num_layers={plan.num_layers}))

# 2. Each run: {_word_run(folder, point)}. The graph stays the same.
from vllm import LLM
llm = LLM(
    model={plan.model_name!r},
    max_logprobs=-1,
    enable_prefix_caching=False,
    additional_config={json.dumps(options)},
)
from neuron.replacement.vllm_neuron_run import run_replaced
run_replaced(llm, {str(directory)!r}, point={point!r})  # writes {_word_logits(folder, point)}
"""


def _word_run(folder: RunFolder, point: Point) -> str:
    if point is None:
        return "nothing is replaced"
    return f"the stream is replaced at {name_point(point, num_layers=folder.plan.num_layers)}"


def _word_logits(folder: RunFolder, point: Point) -> str:
    return str(folder.logits_path(point).relative_to(folder.directory))
