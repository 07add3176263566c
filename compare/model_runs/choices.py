"""Choices: tokens that a whole port chose itself, columns of its logits beyond the vocabulary, prompts run twice.

V the vocabulary.
"""

from __future__ import annotations

from compare.sides.sides import Sides
from minimax_tools.capture.passes import Choice, ModelPasses, Repetition, pass_name
from minimax_tools.model.sites import ModelSite
from minimax_tools.results.model_findings import ModelFinding

CHOSEN_TOKEN, PADDED_LOGITS, REPEATED = "chosen_token", "padded_logits", "repeated_run"
# A logit so far below the largest is masked: its token is never chosen, and takes no share.
_MASKED = -1e3
# Largest difference of two runs of one prompt, relative to the logits: that of right ports is noise of their own size.
_NOISE_FACTOR = 4.0
_LEAST_DIFFERENCE = 0.1


def judge_choices(sides: Sides) -> tuple[ModelFinding, ...]:
    """Judge what a whole port chose, its logits beyond the vocabulary, and its second run of the same prompts."""
    passes = sides.target.read_passes()
    if passes is None:
        return ()
    findings = [
        _judge_placing(passes),
        _judge_choice(passes),
        _judge_padding(passes),
        _judge_repetition(sides, passes),
    ]
    return tuple(finding for finding in findings if finding is not None)


def _judge_choice(passes: ModelPasses) -> ModelFinding | None:
    """Find the first token that is not the likeliest by the port's own logits."""
    wrong = [choice for choice in passes.choices if not _is_likeliest(choice)]
    if not wrong:
        return None
    first = wrong[0]
    behind = "" if first.behind is None else f", {first.behind:.3g} below it"
    elsewhere = [choice for choice in wrong if choice.column is not None]
    reason = (
        f"after the {pass_name(first.number)} the port chose token {first.chosen} for prompt {first.row}; by its own "
        f"logits of that prompt's last token {first.likeliest} is the likeliest{behind}"
    )
    if not elsewhere:
        return ModelFinding(
            number=first.number,
            layer=None,
            sites=(CHOSEN_TOKEN,),
            reason=f"{reason}; a port that draws its tokens at random must be set to the likeliest",
            look_at="the sampling, and the row and shard of the logits that it reads",
        )
    other = elsewhere[0]
    return _of_another_token(
        first.number,
        CHOSEN_TOKEN,
        reason=f"{reason}. Prompt {other.row}'s is the likeliest at column {other.column} of the pass",
        column=other.column or 0,
        is_padding=other.is_padding,
    )


def _judge_placing(passes: ModelPasses) -> ModelFinding | None:
    """Find logits that are those of another token than the prompt's last."""
    if not passes.misplaced:
        return None
    first = passes.misplaced[0]
    others = f", and of {len(passes.misplaced) - 1} more prompts" if len(passes.misplaced) > 1 else ""
    return _of_another_token(
        0,
        str(ModelSite.LOGITS),
        reason=f"the logits of prompt {first.row} are those of column {first.column} of the prefill, and not of its "
        f"last token{others}",
        column=first.column,
        is_padding=first.is_padding,
    )


def _of_another_token(number: int, site: str, *, reason: str, column: int, is_padding: bool) -> ModelFinding:
    """Name logits that were gathered at the wrong column of a pass."""
    name, whose = (
        ("padding_sampled", "padding") if is_padding else ("earlier_row_sampled", "an earlier token")
    )
    return ModelFinding(
        number=number,
        layer=None,
        sites=(site,),
        reason=reason,
        mistake=name,
        what=f"The next token is chosen from the logits of {whose}.",
        look_at="the index of the last real token, by which states or logits are gathered before the choice",
        parameters={"column": column},
    )


def _is_likeliest(choice: Choice) -> bool:
    # Of equal logits any may be chosen.
    return choice.chosen == choice.likeliest or choice.behind == 0.0


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


def _judge_repetition(sides: Sides, passes: ModelPasses) -> ModelFinding | None:
    """Find a prompt whose second run in the same process gave other logits."""
    limit = max(_LEAST_DIFFERENCE, _NOISE_FACTOR * _logits_error(sides))
    wrong = [item for item in passes.repetitions if not item.is_finite or item.difference > limit]
    if not wrong:
        return None
    first = wrong[0]
    return ModelFinding(
        number=first.number,
        layer=None,
        sites=(REPEATED,),
        reason=f"the same prompts, run once more in other rows of the batch, gave other logits: {_word(first)}, limit "
        f"{limit:.3g}",
        mistake="cache_stale",
        what="Something of earlier prompts remains, in the cache or beside it.",
        look_at="where a new prompt resets the cache, and the mask over cached entries that it has not written",
    )


def _word(repetition: Repetition) -> str:
    if not repetition.is_finite:
        return f"NaN or Inf for prompt {repetition.row}"
    return f"those of prompt {repetition.row} differ by {repetition.difference:.3g} of their norm"


def _logits_error(sides: Sides) -> float:
    """Return the median token's relative error of the logits against the golden's; 0 if a side lacks them."""
    if any(ModelSite.LOGITS not in side.model_sites() for side in (sides.reference, sides.target)):
        return 0.0
    golden, port = (
        sides.batch.rows(side.read_model(ModelSite.LOGITS), ModelSite.LOGITS)
        for side in (sides.reference, sides.target)
    )
    held = sides.target.held_tokens(ModelSite.LOGITS)
    if golden.shape != port.shape or not bool(port.isfinite().all()):
        return 0.0
    if held is not None:
        is_held = sides.batch.tokens(held)
        golden, port = golden[is_held], port[is_held]
    errors = (port.double() - golden.double()).norm(dim=-1) / golden.double().norm(dim=-1)
    return float(errors.median())
