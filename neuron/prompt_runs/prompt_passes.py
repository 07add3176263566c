"""The passes of a batch of prompts: one prefill of the prompts, then a step for each token of the longest answer.

The tokens that a step feeds are those of the answer, whatever the port would choose (teacher forcing). A prompt whose
answer has ended goes on with its last token; nothing of that is judged.
B prompts, s columns of a pass, P columns of the port's cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minimax_tools.model.inputs import pad_rows
from minimax_tools.text.answered_prompts import AnsweredPrompt
from neuron.model_runs.passes import Pass


def plan_prompt_passes(
    prompts: Sequence[AnsweredPrompt],
    *,
    padding_side: str,
    buckets: tuple[int, ...] = (),
    pad_token_id: int,
    last_position: int,
) -> list[Pass]:
    """Plan the passes; the prefill is padded to the longest prompt, or to the smallest of `buckets` that holds it.

    The `columns` of a pass are the indices of its tokens in each prompt's row, -1 for others.

    Raises:
        UsageError: A prompt is longer than every bucket.
    """
    prefill = _plan_prefill(prompts, padding_side=padding_side, buckets=buckets, pad_token_id=pad_token_id)
    passes = [prefill]
    lengths = torch.tensor([len(prompt.prompt_ids) for prompt in prompts])
    for number in range(1, max(len(prompt.answer_ids) for prompt in prompts) + 1):
        past_mask = passes[-1].attention_mask
        fed = [prompt.row[min(len(prompt.prompt_ids) + number, len(prompt.row)) - 1] for prompt in prompts]
        has_ended = torch.tensor([number > len(prompt.answer_ids) for prompt in prompts])
        indices = lengths + number - 1
        passes.append(
            Pass(
                number=number,
                input_ids=torch.tensor(fed)[:, None],
                attention_mask=torch.cat((past_mask, torch.ones_like(past_mask[:, :1])), dim=1),
                position_ids=indices.clamp(max=last_position)[:, None],
                columns=torch.where(has_ended, -1, indices)[:, None],
            )
        )
    return passes


def _plan_prefill(
    prompts: Sequence[AnsweredPrompt], *, padding_side: str, buckets: tuple[int, ...], pad_token_id: int
) -> Pass:
    inputs = pad_rows(
        [list(prompt.prompt_ids) for prompt in prompts],
        padding_side=padding_side,
        buckets=buckets,
        pad_token_id=pad_token_id,
        source="prompts",
    )
    is_real = inputs.attention_mask.bool()
    return Pass(
        number=0,
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        position_ids=inputs.position_ids,
        columns=torch.where(is_real, inputs.position_ids, -1),
    )
