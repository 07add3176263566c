"""Choices: tokens that a whole port chose itself, the rule behind the wrong ones, and padded columns of its logits.

A rule is told only if it fits every choice, the right ones too, and if so many hits are no coincidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from compare.catalogue.candidates import Parameters
from compare.model_runs.findings import named_finding
from compare.sides.sides import Sides
from minimax_tools.capture.passes import Choice, ModelPasses, Repeated, pass_name
from minimax_tools.errors import format_count
from minimax_tools.model.sites import ModelSite
from minimax_tools.results.results import ModelFinding

# Largest probability that a rule fits by coincidence.
_MOST_CHANCE = 0.01
# Chance of a token that is the likeliest of no other column.
_RARE = 1 / 512
# Names of a choice from another column, of an earlier token and of padding.
_SAMPLED = ("earlier_row_sampled", "padding_sampled")
# Numbers of ranks that usually divide a vocabulary.
_DEGREES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRule:
    """A known mistake that gives all chosen tokens."""

    mistake: str
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


def _rule_of_column(*, is_padding: bool, parameters: Parameters, chance: float) -> ChoiceRule:
    """Return the rule of a next token that is chosen from the logits of another column of the pass."""
    whose = "padding" if is_padding else "an earlier token"
    return ChoiceRule(
        mistake=_SAMPLED[is_padding],
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
        yield _rule_of_column(is_padding=True, parameters={"column": num_columns - 1}, chance=chance)
    starts = [0 for _ in several]
    if _fits(several, starts):
        chance = _coincidence(several, starts)
        yield _rule_of_column(is_padding=False, parameters={"column": 0}, chance=chance)
    for by in range(1, num_columns):
        # Before a prompt's first token there is none: ports take that one then.
        columns = [max(choice.last_column - by, 0) for choice in several]
        if _fits(several, columns):
            # The token just before is the commonest: others are as many tries.
            chance = (1 if by == 1 else num_columns) * _coincidence(several, columns)
            yield _rule_of_column(is_padding=False, parameters={"by": by}, chance=chance)


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
    return all(column in choice.columns for choice, column in zip(choices, columns, strict=True))


def _prompt_rules(choices: Sequence[Choice], wrong: Sequence[Choice]) -> Iterator[ChoiceRule]:
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
                reason="The likeliest token of another prompt",
                parameters={"by": by},
                chance=num_rows * num_tokens ** -float(len(wrong)),
            )


CHOSEN_TOKEN, PADDED_LOGITS = "chosen_token", "padded_logits"
# A port that draws its tokens takes one of so many likeliest; MiniMax's generation_config.json has 40.
_MOST_DRAWN = 64
# A logit so far below the largest is masked: its token is never chosen, and takes no share.
_MASKED = -1e3


def judge_choices(sides: Sides) -> tuple[ModelFinding, ...]:
    """Judge what a whole port chose, and its logits beyond the vocabulary."""
    passes = sides.target.read_passes()
    if passes is None:
        return ()
    findings = [_judge_placing(passes), _judge_choice(passes), _judge_padding(passes)]
    return tuple(finding for finding in findings if finding is not None)


def draws_tokens(passes: ModelPasses) -> bool:
    """Decide whether a port seems to draw its tokens at random: others each time, all among the likeliest."""
    again = {
        (item.number, item.row): item.chosen
        for item in passes.repetitions
        if item.kind is Repeated.OTHER_ROWS and item.chosen is not None
    }
    changes = any(again.get((one.number, one.row), one.chosen) != one.chosen for one in passes.choices)
    are_likely = all(choice.rank < _MOST_DRAWN for choice in _wrong_choices(passes))
    return changes and are_likely and find_rule(passes.choices, vocab_size=passes.vocab_size) is None


def _judge_choice(passes: ModelPasses) -> ModelFinding | None:
    """Find the first token that is not the likeliest by the port's own logits, and the rule of all such tokens."""
    wrong = _wrong_choices(passes)
    if not wrong:
        return None
    first = wrong[0]
    behind = "" if first.behind is None else f", {first.behind:.3g} below it"
    reason = (
        f"after the {pass_name(first.number)} the port chose token {first.chosen} for prompt {first.row}; by its own "
        f"logits of that prompt's last token {first.likeliest} is the likeliest{behind}"
    )
    if draws_tokens(passes):
        return _of_choice(
            first,
            reason=f"random? {len(wrong)} of {len(passes.choices)} chosen tokens are not the likeliest, and a second "
            "run chose others. They are not judged: set the port to take the likeliest (do_sample=False)",
            look_at="the sampling: MiniMax's generation_config.json asks for it",
            is_warning=True,
        )
    rule = find_rule(passes.choices, vocab_size=passes.vocab_size)
    if rule is None:
        reason += _word_rank(wrong)
        return _of_choice(
            first, reason=reason, look_at="the row and shard of the logits that the choice reads"
        )
    return named_finding(
        rule.mistake,
        number=first.number,
        site=CHOSEN_TOKEN,
        reason=f"{reason}. {rule.reason} explains all {len(wrong)} such tokens",
        parameters=rule.parameters,
    )


def _of_choice(first: Choice, **fields: Any) -> ModelFinding:
    return ModelFinding(number=first.number, layer=None, sites=(CHOSEN_TOKEN,), **fields)


def _word_rank(wrong: Sequence[Choice]) -> str:
    """Say that all chosen tokens have as many likelier ones; nothing of a single token, or if they have not."""
    ranks = {choice.rank for choice in wrong}
    if len(wrong) == 1 or len(ranks) > 1 or not wrong[0].rank:
        return ""
    return f"; each of the {len(wrong)} has {format_count(wrong[0].rank, 'likelier token')}"


def _wrong_choices(passes: ModelPasses) -> list[Choice]:
    return [choice for choice in passes.choices if not is_likeliest(choice)]


def _judge_placing(passes: ModelPasses) -> ModelFinding | None:
    if not passes.misplaced:
        return None
    first = passes.misplaced[0]
    others = f", and of {len(passes.misplaced) - 1} more prompts" if len(passes.misplaced) > 1 else ""
    return named_finding(
        _SAMPLED[first.is_padding],
        number=0,
        site=str(ModelSite.LOGITS),
        reason=f"the logits of prompt {first.row} are those of column {first.column} of the prefill, and not of its "
        f"last token{others}",
        parameters={"column": first.column},
    )


def _judge_padding(passes: ModelPasses) -> ModelFinding | None:
    above = passes.padded_logits_above
    if not passes.num_padded_logits or above is None or above <= _MASKED:
        return None
    beside = f"{above:.3g} above" if above > 0 else f"only {-above:.3g} below"
    return named_finding(
        "padded_logits_live",
        number=0,
        site=PADDED_LOGITS,
        reason=f"the logits have {passes.num_padded_logits} columns beyond the vocabulary that are not masked; the "
        f"largest is {beside} the largest within",
    )
