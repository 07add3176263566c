"""Choices: tokens that a whole port chose itself, and columns of its logits beyond the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compare.model_runs.choice_rules import find_rule, is_likeliest, rule_of_column
from compare.sides.sides import Sides
from minimax_tools.capture.passes import Choice, ModelPasses, Repeated, pass_name
from minimax_tools.errors import format_count
from minimax_tools.model.sites import ModelSite
from minimax_tools.results.model_findings import ModelFinding

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
    explained = f"{reason}. {rule.reason} explains all {len(wrong)} such tokens"
    return _of_choice(
        first,
        reason=explained,
        mistake=rule.mistake,
        what=rule.what,
        look_at=rule.look_at,
        parameters=dict(rule.parameters),
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
    """Find logits that are those of another token than the prompt's last."""
    if not passes.misplaced:
        return None
    first = passes.misplaced[0]
    others = f", and of {len(passes.misplaced) - 1} more prompts" if len(passes.misplaced) > 1 else ""
    rule = rule_of_column(is_padding=first.is_padding, parameters={"column": first.column})
    return ModelFinding(
        number=0,
        layer=None,
        sites=(str(ModelSite.LOGITS),),
        reason=f"the logits of prompt {first.row} are those of column {first.column} of the prefill, and not of its "
        f"last token{others}",
        mistake=rule.mistake,
        what=rule.what,
        look_at=rule.look_at,
        parameters=dict(rule.parameters),
    )


def _judge_padding(passes: ModelPasses) -> ModelFinding | None:
    """Find columns beyond the vocabulary that are not masked."""
    above = passes.padded_logits_above
    if not passes.num_padded_logits or above is None or above <= _MASKED:
        return None
    beside = f"{above:.3g} above" if above > 0 else f"only {-above:.3g} below"
    return ModelFinding(
        number=0,
        layer=None,
        sites=(PADDED_LOGITS,),
        reason=f"the logits have {passes.num_padded_logits} columns beyond the vocabulary that are not masked; the "
        f"largest is {beside} the largest within",
        mistake="padded_logits_live",
        what="The vocabulary is padded for the ranks, and the padding takes part in softmax and choice.",
        look_at="the masking of the padded columns behind lm_head, or where they are cut off",
    )
