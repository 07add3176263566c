"""AnsweredPrompt: a prompt and the answer to it, as token ids; the answer is fed token by token (teacher forcing)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minimax_tools.errors import UsageError
from minimax_tools.model.inputs import Inputs
from minimax_tools.text.lm_eval_samples import LmEvalSample
from minimax_tools.text.tokenizer import decode_if_possible, encode_answered, render_messages

# Tokens at a prompt's end that are decoded if no answer is known.
_USUAL_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredPrompt:
    """A prompt and its answer."""

    name: str  # `prompt 3`, or `doc 17, choice 2`
    prompt_ids: tuple[int, ...]  # tokens that are prefilled, at least one
    answer_ids: tuple[int, ...]  # tokens that are decoded one at a time
    prompt: str  # the prompt's text; empty if the checkpoint has no tokenizer
    answer: str = ""  # the answer's text; empty if it is only the prompt's own end
    target: str = ""  # the right answer; empty if it is not known
    is_right: bool | None = None  # whether the answer was right; None if it is not known
    log_likelihood: float | None = None  # of the answer, as a file recorded it
    num_cut: int = 0  # tokens of the answer that are left out

    @property
    def row(self) -> tuple[int, ...]:
        """Tokens of the prompt and of its answer."""
        return (*self.prompt_ids, *self.answer_ids)


def split_rows(rows: Sequence[Sequence[int]], *, num_decoded: int) -> list[AnsweredPrompt]:
    """Return rows of token ids as prompts without a text, their last `num_decoded` tokens as answers."""
    return [
        AnsweredPrompt(
            name=f"row {number}",
            prompt_ids=tuple(row[: len(row) - num_decoded]),
            answer_ids=tuple(row[len(row) - num_decoded :]),
            prompt="",
        )
        for number, row in enumerate(rows)
    ]


def cut_prompt(prompt: AnsweredPrompt, *, num_decoded: int, max_length: int) -> AnsweredPrompt:
    """Return a prompt of at most `max_length` tokens, cut at its front, with at most `num_decoded` of its answer.

    One without an answer gets its own end as the answer.
    """
    prompt_ids, answer_ids = prompt.prompt_ids, prompt.answer_ids
    if not answer_ids:
        split = len(prompt_ids) - min(_USUAL_STEPS, num_decoded, len(prompt_ids) - 1)
        prompt_ids, answer_ids = prompt_ids[:split], prompt_ids[split:]
    kept = answer_ids[: min(num_decoded, max_length - 1)]
    return replace(
        prompt,
        prompt_ids=prompt_ids[-(max_length - len(kept)) :],
        answer_ids=kept,
        num_cut=len(answer_ids) - len(kept),
    )


def encode_prompts(
    folder: Path, texts: Sequence[str], answers: Sequence[str], *, chat: bool
) -> list[AnsweredPrompt]:
    """Encode prompts and their answers; there are as many answers as prompts, or none.

    Raises:
        UsageError: The numbers differ, or a prompt has no token.
    """
    if answers and len(answers) != len(texts):
        raise UsageError(
            f"{len(answers)} answers for {len(texts)} prompts",
            expected="one --continuation for each --prompt, or none",
        )
    contexts = [render_messages(folder, [("user", text)]) if chat else text for text in texts]
    answers = answers or [""] * len(texts)
    encoded = encode_answered(
        folder, list(zip(contexts, answers, strict=True)), has_special=[chat] * len(contexts)
    )
    return [
        AnsweredPrompt(
            name=f"prompt {number}",
            prompt_ids=_filled(prompt_ids, name=f"prompt {number}"),
            answer_ids=tuple(answer_ids),
            prompt=text,
            answer=answer,
        )
        for number, (text, answer, (prompt_ids, answer_ids)) in enumerate(
            zip(texts, answers, encoded, strict=True)
        )
    ]


def encode_samples(folder: Path, samples: Sequence[LmEvalSample]) -> list[AnsweredPrompt]:
    """Encode the requests of a samples file as lm_eval does.

    Raises:
        UsageError: A request has too few tokens.
    """
    pairs, is_chat = [], []
    for sample in samples:
        if isinstance(sample.context, str):
            context, continuation = sample.context, sample.continuation
        else:
            messages = [(message.role, message.content) for message in sample.context]
            context, continuation = render_messages(folder, messages), sample.continuation
        if not sample.is_generated:
            # As lm_eval does: spaces at the context's end belong to the continuation's first token.
            end = len(context.rstrip())
            context, continuation = context[:end], context[end:] + continuation
        pairs.append((context, continuation))
        is_chat.append(not isinstance(sample.context, str))
    prompts = []
    for sample, pair, (prompt_ids, answer_ids) in zip(
        samples, pairs, encode_answered(folder, pairs, has_special=is_chat), strict=True
    ):
        if not prompt_ids:
            # The likelihood of a whole text: its first token has nothing before it.
            prompt_ids, answer_ids = answer_ids[:1], answer_ids[1:]
        prompts.append(
            AnsweredPrompt(
                name=sample.name,
                prompt_ids=_filled(prompt_ids, name=sample.name),
                answer_ids=tuple(answer_ids),
                prompt=pair[0],
                answer=pair[1],
                target=sample.target,
                is_right=sample.is_right,
                log_likelihood=sample.log_likelihood,
            )
        )
    return prompts


def token_rows(folder: Path, inputs: Inputs, *, num_decoded: int) -> list[AnsweredPrompt]:
    """Return the rows of a batch as prompts, of which the last `num_decoded` tokens are decoded.

    Raises:
        UsageError: A row is too short.
    """
    rows = inputs.real_rows()
    shortest = min(len(row) for row in rows)
    if num_decoded >= shortest:
        raise UsageError(
            f"of a row of {shortest} tokens {num_decoded} cannot be decoded",
            expected="at least one token of each row before the first that is decoded",
            next_step="Give --decode fewer tokens.",
        )
    prompts = split_rows(rows, num_decoded=num_decoded)
    texts = decode_if_possible(folder, rows)
    return [replace(prompt, prompt=text or "") for prompt, text in zip(prompts, texts, strict=True)]


def _filled(ids: list[int], *, name: str) -> tuple[int, ...]:
    if not ids:
        raise UsageError(f"{name} has no token", next_step="Leave it out.")
    return tuple(ids)
