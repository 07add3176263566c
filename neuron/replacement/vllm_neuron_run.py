"""A run by hand on vLLM Neuron with the stream replaced at one point: its files, and its requests.

| file | holds |
|---|---|
| `tensors_NAME.pt` | of each prompt, values [1,T,H] and mask [1,T,1] of every point, as the only step |
| `prompt_token_ids.pt` | of each prompt, its tokens before those that are decoded, by which requests are recognised |

Only the point's own values are stored; the other points hold zeros that take no room. Each request is a row's tokens up
to one of those that are decoded; its only new token gives the distribution there. Log-probabilities serve as logits:
the judge sees no constant that is added to all of a token's logits. T tokens of a row, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from minimax_tools.errors import TargetError, UsageError
from minimax_tools.machine.files import whole_capture_file
from minimax_tools.model.inputs import Inputs
from minimax_tools.results.probes import Point
from neuron.ports.vllm_neuron_stream import MASK, point_name
from neuron.replacement.run_folder import RunFolder
from neuron.replacement.stream import GoldenStream

TOKENS_NAME = "prompt_token_ids.pt"


def tensors_name(folder: RunFolder, point: Point) -> str:
    """Return the name of the file that replaces the stream at a point."""
    return f"tensors_{folder.name_run(point)}.pt"


def write_token_ids(folder: RunFolder) -> None:
    """Write the tokens by which the plugin recognises requests."""
    rows = folder.read_inputs().real_rows()
    _save([row[: len(row) - folder.plan.num_decoded] for row in rows], folder.directory / TOKENS_NAME)


def write_tensors(folder: RunFolder, stream: GoldenStream, point: Point) -> Path:
    """Write the file that replaces the stream at a point; return its path."""
    states = None if point is None else stream.read(point)
    masks = stream.inputs.attention_mask.bool()
    prompts = []
    for row, mask in enumerate(masks):
        values = None if states is None else states[row, mask]
        prompts.append(dict(_points(folder, point, values, num_tokens=int(mask.sum()))))
    path = folder.directory / tensors_name(folder, point)
    _save(prompts, path)
    return path


def _save(prompts: list[Any], path: Path) -> None:
    with whole_capture_file(path) as temporary:
        torch.save(prompts, temporary)


def refuse_requests(inputs: Inputs, *, num_decoded: int) -> None:
    """Refuse prompts whose requests the plugin would take for others."""
    rows = [tuple(row[: len(row) - num_decoded]) for row in inputs.real_rows()]
    faults = [
        f"row {longer} begins with row {shorter}"
        for longer, one in enumerate(rows)
        for shorter, other in enumerate(rows)
        if longer != shorter and one[: len(other)] == other
    ]
    if int(inputs.position_ids[inputs.attention_mask.bool()].min()):
        faults.append("positions that do not begin at 0")
    if faults:
        raise UsageError(
            "vLLM Neuron cannot tell the golden's prompts apart",
            expected="prompts that begin differently, at position 0",
            found="; ".join(faults[:3]),
            next_step="Capture a golden of other prompts.",
        )


def _points(
    folder: RunFolder, point: Point, values: torch.Tensor | None, *, num_tokens: int
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    plan = folder.plan
    # One element, shown as many: torch.save stores the one.
    zero = torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    for other in range(plan.num_layers + 1):
        name = point_name(other, num_layers=plan.num_layers)
        is_replaced = other == point and values is not None
        shown = zero.expand(1, num_tokens, plan.hidden_size)
        yield name, [values[None].contiguous() if is_replaced and values is not None else shown]
        yield name + MASK, [(zero + float(is_replaced)).expand(1, num_tokens, 1)]


def run_replaced(llm: Any, folder: str | Path, *, point: int | None) -> Path:
    """Run the requests of a folder, and write their logits into it; `llm` was built with the point's files.

    Raises:
        TargetError: The engine returned no log-probabilities, or not those of the whole vocabulary.
    """
    from vllm import SamplingParams

    opened = RunFolder.open(Path(folder))
    requests = [request for row in list_requests(opened) for request in row]
    parameters = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    outputs = llm.generate([{"prompt_token_ids": request} for request in requests], parameters)
    logits = torch.stack([_read_logits(output, vocab_size=opened.plan.vocab_size) for output in outputs])
    return opened.write_logits(point, logits.unflatten(0, (-1, opened.plan.num_steps)))


def list_requests(folder: RunFolder) -> list[list[list[int]]]:
    """Return the requests of each row: its tokens up to each that is decoded, and the prompt alone first."""
    num_decoded = folder.plan.num_decoded
    return [
        [row[: len(row) - num_decoded + number] for number in range(num_decoded + 1)]
        for row in folder.read_inputs().real_rows()
    ]


def _read_logits(output: Any, *, vocab_size: int) -> torch.Tensor:
    found: Sequence[Any] = output.outputs[0].logprobs or ()
    by_token = dict(found[0]) if found else {}
    missing = vocab_size - len(by_token.keys() & set(range(vocab_size)))
    if missing:
        raise TargetError(
            f"a request's log-probabilities lack {missing} tokens of the vocabulary",
            expected=f"those of all {vocab_size} tokens",
            found=str(len(by_token)),
            next_step="Build the engine with max_logprobs=-1, and max_logprobs -1 in its neuron_config.",
        )
    return torch.tensor([by_token[token].logprob for token in range(vocab_size)])
