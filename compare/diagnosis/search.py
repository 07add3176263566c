"""The search: the hypotheses of one layer, screened on some tokens, fitted, and judged on all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from compare.diagnosis.fitting import fit_parameters
from compare.diagnosis.layer_case import spread_places
from compare.diagnosis.mistake import Hypothesis, Mistake
from compare.diagnosis.naming import LIMITS, best_first, is_proof, name_mistakes
from compare.diagnosis.trial import Score, Trial
from minimax_tools.model.sites import Site

logger = logging.getLogger(__name__)

# Some 365 hypotheses are screened on few tokens: one of attention changes the experts' input, and costs a run of all
# experts. With these numbers a layer of true size takes 185 s of processor time (BENCHMARKS.md).
_FIRST_TOKENS, _SCREENING_TOKENS = 24, 64
# Hypotheses that go from the first tokens to the screening ones: three times the finalists, and a few by
# likeness, which a parameter that is far off does not spoil (DECISIONS.md).
_SURVIVORS = 30
_MOST_ALIKE = 3
# Fitting tries 5 values in 4 to 7 rounds: 6 hypotheses are 120 to 210 trials beside the 365.
_MOST_FITTED = 6
# Judged on all tokens: the best by what they leave, and the clearest of those that noise covers.
_MOST_FINALISTS, _MOST_FAINT = 10, 5
# Pairs are 5 of attention with all of the experts' hypotheses, and the reverse: all with all are tens of thousands.
_PARTNERS = 5
# As many as a report shows.
_MOST_NEAREST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """Outcome of the search in one layer.

    Args:
        null: The layer without a mistake.
        named: The scores that explain it, best first; those behind the first resemble it.
        nearest: The best scores, best first.
        num_tried: How many hypotheses were tried.
    """

    null: Score
    named: tuple[Score, ...] = ()
    nearest: tuple[Score, ...] = ()
    num_tried: int = 0


def search_layer(
    trial: Trial, mistakes: Sequence[Mistake], *, suspects: frozenset[Site], expected: Sequence[Hypothesis]
) -> SearchOutcome:
    """Find the mistakes that explain a layer.

    Hypotheses are tried in turns, until one explains the layer: mistakes that explained other layers, those that begin
    at a blamed site, all others, and pairs.

    Args:
        trial: Judges hypotheses on all tokens.
        mistakes: The catalogue's entries to try.
        suspects: The sites that are to blame; empty where none is known.
        expected: Mistakes that explained other layers of this run, with the parameters that were fitted there.
    """
    null = trial.null()
    if not bool(trial.is_usable.any()):
        return SearchOutcome(null=null)
    first, screen = (_screen(trial, most) for most in (_FIRST_TOKENS, _SCREENING_TOKENS))
    num_tried = 0
    seen: list[Score] = []
    tried: list[Score] = []
    finals: list[Score] = []
    for is_expected, hypotheses in _turns(trial, mistakes, suspects=suspects, expected=expected):
        num_tried += len(hypotheses)
        logger.info("Trying %d hypotheses on %d tokens.", len(hypotheses), len(first.base.tokens))
        scores = first.judge(hypotheses)
        seen += scores
        tried += _sift(first, screen, scores)
        finals = _finish(trial, screen, tried)
        named = name_mistakes(finals)
        if named and (not is_expected or is_proof(named[0])):
            return SearchOutcome(null=null, named=named, num_tried=num_tried)
    faint = _search_faint(trial, screen, [score.hypothesis for score in (*tried, *finals)])
    named = name_mistakes(faint)
    # Below that a pair cannot be told from a single mistake.
    pairs = [] if named or null.leaves < LIMITS.clear else _pairs(seen)
    if pairs:
        logger.info("Trying %d pairs of mistakes on %d tokens.", len(pairs), len(first.base.tokens))
        named = name_mistakes(_finish(trial, screen, _sift(first, screen, first.judge(pairs))))
    nearest = sorted(best_first(finals), key=lambda score: -score.explains)[:_MOST_NEAREST]
    return SearchOutcome(
        null=null,
        named=named,
        nearest=() if named else tuple(nearest),
        num_tried=num_tried + len(pairs),
    )


def _search_faint(trial: Trial, screen: Trial, hypotheses: Sequence[Hypothesis]) -> list[Score]:
    """Score mistakes that the noise may cover; none where the error is far above it."""
    null = trial.null()
    if null.leaves > LIMITS.faint_below:
        return []
    unique = list(dict.fromkeys(hypotheses))
    logger.info("Trying %d hypotheses as filters.", len(unique))
    screened = best_first(screen.judge_faint(unique))
    best = sorted(screened, key=lambda score: -score.z)[:_MOST_FINALISTS]
    chosen = list(dict.fromkeys([*best, *_most_alike(screened)]))
    return chosen if screen is trial else trial.judge_faint([score.hypothesis for score in chosen])


def _most_alike(scores: Sequence[Score], most: int = _MOST_ALIKE) -> list[Score]:
    """Return the few whose predicted error points where the port's does, however large it is."""
    return sorted(scores, key=lambda score: -score.likeness)[:most]


def _turns(
    trial: Trial, mistakes: Sequence[Mistake], *, suspects: frozenset[Site], expected: Sequence[Hypothesis]
) -> Iterator[tuple[bool, list[Hypothesis]]]:
    """Yield the hypotheses in turns, and whether a turn is of mistakes that explained other layers."""
    names = {one.name for one in expected}
    # The catalogue's candidates first: a value that was fitted elsewhere must explain more than they do.
    left = [one for mistake in mistakes for one in mistake.hypotheses(trial.base.scene)] + list(expected)
    choices: list[Callable[[Hypothesis], bool]] = [
        lambda one: one.name in names,
        lambda one: bool(one.sites & suspects),
        lambda _: True,
    ]
    for number, is_chosen in enumerate(choices):
        chosen = [one for one in left if is_chosen(one)]
        left = [one for one in left if not is_chosen(one)]
        if chosen:
            yield number == 0, chosen


def _sift(first: Trial, screen: Trial, scores: Sequence[Score]) -> list[Score]:
    """Score on more tokens the hypotheses that the first few tokens do not refute."""
    if first is screen:
        return list(scores)
    ranked = best_first(scores)
    null = first.null().misfit
    names = {
        score.hypothesis.name
        for place, score in enumerate(ranked)
        if place < _SURVIVORS or score.misfit <= null
    }
    names |= {score.hypothesis.name for score in _most_alike(_fitted(ranked))}
    survivors = {id(score.hypothesis): score.hypothesis for score in ranked if score.hypothesis.name in names}
    logger.info("Trying the best %d on %d tokens.", len(survivors), len(screen.base.tokens))
    return screen.judge(list(survivors.values()))


def _screen(trial: Trial, most: int) -> Trial:
    lengths = trial.base.scene.attention_mask.sum(-1).tolist()
    num_tokens = len(trial.base.tokens)
    places = spread_places(num_tokens, lengths, most)
    return trial if len(places) == num_tokens else trial.at(places)


def _finish(trial: Trial, screen: Trial, scores: Sequence[Score]) -> list[Score]:
    """Fit the parameters of the best scores, and judge them on all tokens."""
    best = best_first(scores)
    faint = sorted(best, key=lambda score: -abs(score.z))[:_MOST_FAINT]
    finalists = list(dict.fromkeys([*best[:_MOST_FINALISTS], *faint]))
    if best and not is_proof(best[0]):
        # A parameter that is far off spoils the misfit, not the direction.
        fitted = list(dict.fromkeys([*_fitted(best[:_MOST_FITTED]), *_most_alike(_fitted(best))]))
        logger.info("Fitting the parameters of the best %d.", len(fitted))
        others = [score for score in finalists if score not in fitted]
        finalists = [*fit_parameters(screen, fitted), *others]
    if screen is trial:
        return finalists
    logger.info("Judging the best %d on %d tokens.", len(finalists), len(trial.base.tokens))
    judged = trial.judge([score.hypothesis for score in finalists])
    wanted = {(id(score.hypothesis), score.is_decode_only) for score in finalists}
    return [score for score in judged if (id(score.hypothesis), score.is_decode_only) in wanted]


def _fitted(scores: Sequence[Score]) -> list[Score]:
    """Keep scores of mistakes with a fitted parameter."""
    return [score for score in scores if any(one.fitted for one in score.hypothesis.mistakes)]


def _pairs(scores: Sequence[Score]) -> list[Hypothesis]:
    """Pair a mistake of attention with one of the experts: the best few of each, and the best with all others."""
    attention, experts = (
        [
            score
            for score in scores
            if not score.is_decode_only
            and len(score.hypothesis.mistakes) == 1
            and score.hypothesis.is_of_attention is of_attention
        ]
        for of_attention in (True, False)
    )
    if not attention or not experts:
        return []
    couples = [(first, second) for first in _partners(attention) for second in _partners(experts)]
    couples += [(first, best_first(experts)[0]) for first in attention]
    couples += [(best_first(attention)[0], second) for second in experts]
    unique = {
        (id(first.hypothesis), id(second.hypothesis)): first.hypothesis.and_also(second.hypothesis)
        for first, second in couples
    }
    return list(unique.values())


def _partners(scores: Sequence[Score]) -> list[Score]:
    """Return the best few by what they leave, and by how much they resemble the error."""
    best = best_first(scores)
    return [*best[:_PARTNERS], *_most_alike(best, _PARTNERS)]
