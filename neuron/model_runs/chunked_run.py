"""Chunked run: a port's prompts in passes of several tokens behind a cache, which it may refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from neuron.model_runs.assembly import last_logits
from neuron.model_runs.model_executor import ModelExecutor, PassRefusedError, PassRequest
from neuron.model_runs.pass_result import PassResult
from neuron.model_runs.passes import Pass

# The chunk, counted from 0, by which a port that forgets is told from others.
_PROBED = 2
# Largest difference of logits, relative to them, that is one of arithmetic: what a prefix adds is far more.
_ALIKE = 0.05


def run_chunks(executor: ModelExecutor, chunks: Sequence[Pass]) -> tuple[list[PassResult], str]:
    """Return the results of the chunks, or none and the reason why they are not tested."""
    if not chunks:
        return [], "no prompt has tokens enough"
    if not executor.takes_chunks:
        return [], "the port says that it takes none"
    try:
        results = [_run(executor, chunk) for chunk in chunks]
        is_forgetful = executor.keeps_cache and _forgets(executor, chunks, results)
    except PassRefusedError as error:
        return [], f"the port refuses them: {error.found}"
    if is_forgetful:
        return [], "the port takes each for new prompts, and forgets what it has cached"
    return results, ""


def _run(executor: ModelExecutor, chunk: Pass, *, records: bool = True) -> PassResult:
    request = PassRequest(model_pass=chunk, is_first=chunk.number == 0, records=records, may_be_refused=True)
    return executor.run(request)


def _forgets(executor: ModelExecutor, chunks: Sequence[Pass], results: Sequence[PassResult]) -> bool:
    """Decide whether a port that keeps its cache begins anew with the second chunk.

    Then the third one has the logits that it has behind the second alone.
    """
    if len(chunks) <= _PROBED:
        return False
    second = _as_new_prompts(chunks[_PROBED - 1])
    third = _behind(second, chunks[_PROBED])
    _run(executor, second, records=False)
    again = _run(executor, third, records=False)
    has_tokens = (third.columns >= 0).any(dim=1)
    before, later = (
        last_logits(third, logits)[has_tokens].double() for logits in (results[_PROBED].logits, again.logits)
    )
    differences = (later - before).norm(dim=-1) / before.norm(dim=-1)
    return bool((differences <= _ALIKE).all())


def _as_new_prompts(chunk: Pass) -> Pass:
    """Return a chunk as the first pass: its own tokens alone, at their positions."""
    return replace(chunk, number=0, attention_mask=_own_mask(chunk))


def _behind(before: Pass, chunk: Pass) -> Pass:
    """Return a chunk as the pass behind `before` alone."""
    mask = torch.cat((before.attention_mask, _own_mask(chunk)), dim=1)
    return replace(chunk, number=before.number + 1, attention_mask=mask)


def _own_mask(chunk: Pass) -> torch.Tensor:
    return chunk.attention_mask[:, -chunk.batch_shape[1] :]
