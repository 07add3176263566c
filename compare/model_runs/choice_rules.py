"""Choice rules: the one rule that explains all tokens that a port chose wrongly, if no chance does.

A rule is told only if it fits every choice, the right ones too, and if so many hits are no coincidence: with few wrong
tokens a rule that many others stand beside fits too easily. V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compare.diagnosis.mistake import Parameters
from minimax_tools.capture.passes import Choice

# Largest probability that a rule fits by coincidence.
_MOST_CHANCE = 0.01
# Chance of a token that is the likeliest of no other column.
_RARE = 1 / 512
# Numbers of ranks that usually divide a vocabulary.
_DEGREES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRule:
    """A known mistake that gives all chosen tokens."""

    mistake: str
    what: str
    look_at: str
    reason: str  # the rule in words
    parameters: Parameters
    chance: float  # probability that it fits by coincidence


def find_rule(choices: Sequence[Choice], *, vocab_size: int) -> ChoiceRule | None:
    """Return the rule that explains the wrong choices, and fits the right ones; None if none does beyond chance."""
    wrong = [choice for choice in choices if not is_likeliest(choice)]
    if not wrong:
        return None
    found = [
        *_shard_rules(choices, wrong, vocab_size=vocab_size),
        *_column_rules(choices, wrong),
        *_prompt_rules(choices, wrong),
    ]
    best = min(found, key=lambda rule: rule.chance, default=None)
    return best if best is not None and best.chance <= _MOST_CHANCE else None


def is_likeliest(choice: Choice) -> bool:
    """Decide whether the likeliest token was chosen; of equal logits any may be."""
    return choice.chosen == choice.likeliest or choice.behind == 0.0


def rule_of_column(*, is_padding: bool, parameters: Parameters, chance: float = 0.0) -> ChoiceRule:
    """Return the rule of a next token that is chosen from the logits of another column of the pass."""
    whose = "padding" if is_padding else "an earlier token"
    return ChoiceRule(
        mistake="padding_sampled" if is_padding else "earlier_row_sampled",
        what=f"The next token is chosen from the logits of {whose}.",
        look_at="the index of the last real token, by which states or logits are gathered before the choice",
        reason=f"The choice from the logits of {whose}",
        parameters=parameters,
        chance=chance,
    )


def _shard_rules(
    choices: Sequence[Choice], wrong: Sequence[Choice], *, vocab_size: int
) -> Iterator[ChoiceRule]:
    """Try choices by their numbers within a shard of the vocabulary, and numbers that are off by shard."""
    if not vocab_size:
        return
    for degree in _DEGREES:
        width = math.ceil(vocab_size / degree)
        if all(choice.chosen == choice.likeliest % width for choice in choices):
            yield _shard_rule({"shard_width": width}, chance=len(_DEGREES) * vocab_size ** -len(wrong))
    # Numbers that are off by the same in the whole of a shard, and by more in later ones.
    differences = {choice.likeliest: choice.likeliest - choice.chosen for choice in choices}
    ordered = [differences[token] for token in sorted(differences)]
    groups = len(set(ordered) - {0})
    is_one_way = min(ordered) >= 0 or max(ordered) <= 0
    sizes = [abs(difference) for difference in ordered]
    num_apart = len({choice.likeliest for choice in wrong})
    if is_one_way and sizes == sorted(sizes) and num_apart > groups:
        parameters = {"by": ", ".join(str(difference) for difference in dict.fromkeys(ordered) if difference)}
        yield _shard_rule(parameters, chance=float(vocab_size) ** (groups - num_apart))


def _shard_rule(parameters: Parameters, *, chance: float) -> ChoiceRule:
    return ChoiceRule(
        mistake="token_shard_offset",
        what="The chosen token has a number that lacks the offset of its shard of the vocabulary, or a part of it.",
        look_at="where a shard's best token becomes a number of the whole vocabulary: the shard's first row is added",
        reason="A number without the offset of its vocabulary shard",
        parameters=parameters,
        chance=chance,
    )


def _column_rules(choices: Sequence[Choice], wrong: Sequence[Choice]) -> Iterator[ChoiceRule]:
    """Try the last column of a pass, its first one, and those so many before the prompt's last token."""
    several = [choice for choice in choices if choice.num_columns > 1]
    if not several or any(choice.num_columns == 1 for choice in wrong):
        # A step has one column alone: nothing else could be chosen from.
        return
    num_columns = max(choice.num_columns for choice in several)
    ends = [choice.num_columns - 1 for choice in several]
    if any(choice.last_column < choice.num_columns - 1 for choice in wrong) and _fits(several, ends):
        chance = _coincidence(several, ends)
        yield rule_of_column(is_padding=True, parameters={"column": num_columns - 1}, chance=chance)
    starts = [0 for _ in several]
    if _fits(several, starts):
        chance = _coincidence(several, starts)
        yield rule_of_column(is_padding=False, parameters={"column": 0}, chance=chance)
    for by in range(1, num_columns):
        # Before a prompt's first token there is none: ports take that one then.
        columns = [max(choice.last_column - by, 0) for choice in several]
        if _fits(several, columns):
            # The token just before is the commonest: others are as many tries.
            chance = (1 if by == 1 else num_columns) * _coincidence(several, columns)
            yield rule_of_column(is_padding=False, parameters={"by": by}, chance=chance)


def _coincidence(choices: Sequence[Choice], columns: Sequence[int]) -> float:
    """Return the chance that the wrong ones of some choices are the likeliest tokens of their columns by coincidence.

    A token is the likelier to be chosen for another reason the more other columns of the prompt it is the likeliest of.
    """
    chance = 1.0
    for choice, column in zip(choices, columns, strict=True):
        if not is_likeliest(choice):
            others = sum(other <= choice.last_column and other != column for other in choice.columns)
            chance *= min(others / (choice.last_column + 1) + _RARE, 1.0)
    return chance


def _fits(choices: Sequence[Choice], columns: Sequence[int]) -> bool:
    """Decide whether each choice is the likeliest token of its column."""
    return all(column in choice.columns for choice, column in zip(choices, columns, strict=True))


def _prompt_rules(choices: Sequence[Choice], wrong: Sequence[Choice]) -> Iterator[ChoiceRule]:
    """Try the likeliest tokens of other prompts."""
    likeliest = {(choice.number, choice.row): choice.likeliest for choice in choices}
    num_rows = 1 + max(choice.row for choice in choices)
    num_tokens = len(set(likeliest.values()))
    for by in range(1, num_rows):
        if all(
            choice.chosen == likeliest.get((choice.number, (choice.row + by) % num_rows))
            for choice in choices
        ):
            yield ChoiceRule(
                mistake="token_of_another_prompt",
                what="A prompt gets the next token of another row of the batch.",
                look_at="the order of the batch's rows behind the head, or the sequence ids",
                reason="The likeliest token of another prompt",
                parameters={"by": by},
                chance=num_rows * num_tokens ** -float(len(wrong)),
            )
