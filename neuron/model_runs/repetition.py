"""Repetition: a run's prompts, computed once more in the same process, and what of their logits is then another.

The prompts come again in other rows of the batch. If a prompt's logits change by that, three further runs tell what
they depend on: the same rows again, the other rows in a shape that is new to the port, and other neighbours.
B prompts, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from compare.model_runs.chunks import LEAST_DIFFERENCE
from minimax_tools.capture.passes import Repeated, Repetition
from neuron.model_runs.assembly import PassResult, last_logits
from neuron.model_runs.model_executor import ModelExecutor, PassRefusedError, PassRequest
from neuron.model_runs.passes import Pass

# Least norm to divide by.
_TINY = 1e-30


def other_rows(num_prompts: int) -> torch.Tensor:
    """Return the prompt that each row of the batch holds in a repetition, int64 [B]."""
    return torch.arange(num_prompts).roll(1)


def repeat_run(
    executor: ModelExecutor, passes: Sequence[Pass], results: Sequence[PassResult], *, vocab_size: int
) -> tuple[Repetition, ...]:
    """Run the passes again, as often as it takes to tell what their logits depend on; `results` are the first."""
    num_prompts = passes[0].batch_shape[0]
    rows = other_rows(num_prompts)

    def repeat(kind: Repeated, planned: Sequence[Pass], prompts: torch.Tensor) -> list[Repetition]:
        return list(_repeat(executor, passes, results, planned=planned, kind=kind, prompts=prompts))

    in_other_rows = [model_pass.in_rows(rows) for model_pass in passes]
    found = repeat(Repeated.OTHER_ROWS, in_other_rows, rows)
    if not any(map(_is_suspect, found)):
        return tuple(found)
    every = torch.arange(num_prompts)
    again = repeat(Repeated.SAME_ROWS, passes, every)
    found += again
    if any(map(_is_suspect, again)) or num_prompts == 1:
        return tuple(found)
    found += repeat(Repeated.OTHER_SHAPE, _widened(in_other_rows), rows)
    for kept in (every[::2], every[1::2]):
        beside = repeat(Repeated.OTHER_NEIGHBOURS, _beside_others(passes, kept, vocab_size), every)
        found += [item for item in beside if item.row in kept]
    return tuple(found)


def compare_logits(
    number: int, prompts: Sequence[int], before: torch.Tensor, again: torch.Tensor, *, kind: Repeated
) -> Iterator[Repetition]:
    """Compare logits [B,V] that were computed twice; row b of both is of prompt `prompts[b]` in the pass `number`."""
    for prompt, earlier, later in zip(prompts, before.double(), again.double(), strict=True):
        if not bool(earlier.isfinite().all()):
            # NaN the first time is judged where it arises.
            continue
        difference = float((later - earlier).norm() / earlier.norm().clamp(min=_TINY))
        is_finite = math.isfinite(difference)
        # JSON has no NaN.
        yield Repetition(
            number=number,
            row=prompt,
            difference=difference if is_finite else 0.0,
            is_finite=is_finite,
            kind=kind,
        )


def _repeat(
    executor: ModelExecutor,
    passes: Sequence[Pass],
    results: Sequence[PassResult],
    *,
    planned: Sequence[Pass],
    kind: Repeated,
    prompts: torch.Tensor,
) -> Iterator[Repetition]:
    """Run the planned passes, whose row b holds prompt `prompts[b]`; a shape that the port refuses ends it."""
    for model_pass, other, result in zip(passes, planned, results, strict=True):
        request = PassRequest(
            model_pass=other,
            is_first=other.number == 0,
            records=False,
            may_be_refused=kind is Repeated.OTHER_SHAPE,
        )
        try:
            again = executor.run(request)
        except PassRefusedError:
            return
        before, later = last_logits(model_pass, result.logits)[prompts], last_logits(other, again.logits)
        compared = compare_logits(model_pass.number, prompts.tolist(), before, later, kind=kind)
        chosen = (
            None if again.tokens is None else dict(zip(prompts.tolist(), again.tokens.tolist(), strict=True))
        )
        yield from (
            compared if chosen is None else (replace(item, chosen=chosen[item.row]) for item in compared)
        )


def _is_suspect(repetition: Repetition) -> bool:
    return not repetition.is_finite or repetition.difference > LEAST_DIFFERENCE


def _widened(passes: Sequence[Pass]) -> list[Pass]:
    """Add columns of padding at the end of the prefill, which no later pass sees.

    They are so many that no pass has the mask's shape of an earlier one.
    """
    prefill, *steps = passes
    width, num_added = prefill.batch_shape[1], len(passes)

    def with_added(tensor: torch.Tensor, filling: torch.Tensor) -> torch.Tensor:
        added = filling.expand(-1, num_added)
        return torch.cat((tensor[:, :width], added, tensor[:, width:]), dim=1)

    def with_hidden(model_pass: Pass) -> torch.Tensor:
        return with_added(model_pass.attention_mask, torch.zeros_like(model_pass.attention_mask[:, :1]))

    wider = replace(
        prefill,
        input_ids=with_added(prefill.input_ids, prefill.input_ids[:, -1:]),
        attention_mask=with_hidden(prefill),
        position_ids=with_added(prefill.position_ids, prefill.position_ids[:, -1:]),
        columns=with_added(prefill.columns, torch.full_like(prefill.columns[:, :1], -1)),
    )
    return [wider, *(replace(step, attention_mask=with_hidden(step)) for step in steps)]


def _beside_others(passes: Sequence[Pass], kept: torch.Tensor, vocab_size: int) -> list[Pass]:
    changed = []
    for model_pass in passes:
        ids = (model_pass.input_ids + vocab_size // 3) % vocab_size
        ids[kept] = model_pass.input_ids[kept]
        changed.append(replace(model_pass, input_ids=ids))
    return changed
