"""A run by hand on vLLM Neuron: requests whose stream the plugin replaces, and their next-token distributions.

Each request is a row's tokens up to one of those that are decoded; its only new token gives the distribution there.
Log-probabilities serve as logits: the judge sees no constant that is added to all of a token's logits.
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minimax_tools.errors import TargetError
from neuron.replacement.run_folder import RunFolder


def run_replaced(llm: Any, folder: str | Path, *, point: int | None) -> Path:
    """Run the requests of a folder, and write their logits into it; `llm` was built with the point's files.

    Raises:
        TargetError: The engine returned no log-probabilities, or not those of the whole vocabulary.
        CaptureError: The folder was not written by mm2-test replacement, or cannot be written.
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
    """Return the log-probabilities [V] of a request's new token."""
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
