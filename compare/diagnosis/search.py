"""The search: the hypotheses of one layer, screened on some tokens, fitted, and judged on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


from compare.diagnosis.fitting import fit_parameters
from compare.diagnosis.layer_case import spread_places
from compare.diagnosis.mistake import Hypothesis, Mistake
from compare.diagnosis.naming import best_first, name_mistakes
from compare.diagnosis.trial import Score, Trial
from minimax_tools.sites import Site

# Tokens that screen: attention's hypotheses ask for other experts' inputs each, and cost most.
_SCREENING_TOKENS = 64
_MOST_FITTED = 6
_MOST_FINALISTS = 10
_PARTNERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the search of one layer came to.

    Args:
        null: The layer without a mistake.
        named: The scores that explain it, best first; those behind the first resemble it.
        nearest: The best scores, best first.
        num_tried: How many hypotheses were tried.
    """

    null: Score
    named: tuple[Score, ...]
    nearest: tuple[Score, ...]
    num_tried: int


def search_layer(
    trial: Trial, mistakes: Sequence[Mistake], *, suspects: frozenset[Site], with_pairs: bool = True
) -> Outcome:
    """Find the mistakes that explain a layer.

    Args:
        trial: What judges, on all tokens.
        mistakes: The catalogue's entries to try.
        suspects: The sites that are to blame: hypotheses that begin there come first. Empty where none is known.
        with_pairs: Whether to try two mistakes together where no single one explains it.
    """
    null = trial.null()
    screen = _screen(trial)
    scene = trial.base.scene
    hypotheses = [one for mistake in mistakes for one in mistake.hypotheses(scene)]
    first = [one for one in hypotheses if not suspects or one.sites & suspects]
    others = [one for one in hypotheses if one not in first]
    tried: list[Score] = []
    named: tuple[Score, ...] = ()
    finals: list[Score] = []
    num_tried = 0
    for some in (first, others):
        if named or not some:
            continue
        num_tried += len(some)
        tried += screen.judge(some)
        finals = _finish(trial, screen, tried)
        named = name_mistakes(finals)
    if not named and with_pairs:
        pairs = _pairs(tried)
        num_tried += len(pairs)
        if pairs:
            finals += _finish(trial, screen, screen.judge(pairs))
            named = name_mistakes(finals)
    return Outcome(null=null, named=named, nearest=tuple(best_first(finals)[:3]), num_tried=num_tried)


def _screen(trial: Trial) -> Trial:
    scene = trial.base.scene
    lengths = scene.attention_mask.sum(-1).tolist()
    num_tokens = len(trial.base.tokens)
    places = spread_places(num_tokens, lengths, _SCREENING_TOKENS)
    return trial if len(places) == num_tokens else trial.at(places)


def _finish(trial: Trial, screen: Trial, scores: Sequence[Score]) -> list[Score]:
    """The best of the screened, their parameters fitted, judged on all tokens."""
    best = best_first(scores)
    faint = sorted(best, key=lambda score: -abs(score.z))
    candidates = list(dict.fromkeys([*best[:_MOST_FINALISTS], *faint[:_MOST_FINALISTS // 2]]))
    fitted = fit_parameters(screen, candidates[:_MOST_FITTED])
    finalists = [*fitted, *candidates[_MOST_FITTED:]]
    if screen is trial:
        return finalists
    judged = trial.judge([score.hypothesis for score in finalists])
    wanted = {(id(score.hypothesis), score.is_decode_only) for score in finalists}
    return [score for score in judged if (id(score.hypothesis), score.is_decode_only) in wanted]


def _pairs(scores: Sequence[Score]) -> list[Hypothesis]:
    """One mistake of attention and one of the experts: of the best few of each, and the best with every other."""
    single = [score for score in best_first(scores) if not score.is_decode_only]
    halves = [
        [score for score in single if score.hypothesis.is_of_attention is of_attention]
        for of_attention in (True, False)
    ]
    pairs: dict[tuple[int, int], Hypothesis] = {}
    chosen = [
        [*half[:_PARTNERS], *sorted(half, key=lambda score: -score.likeness)[:_PARTNERS]] for half in halves
    ]
    for attention in chosen[0]:
        for experts in chosen[1]:
            pairs[id(attention), id(experts)] = attention.hypothesis.and_also(experts.hypothesis)
    if single:
        leader = single[0]
        for other in halves[1] if leader.hypothesis.is_of_attention else halves[0]:
            ordered = (leader, other) if leader.hypothesis.is_of_attention else (other, leader)
            pairs[id(ordered[0]), id(ordered[1])] = ordered[0].hypothesis.and_also(ordered[1].hypothesis)
    return list(pairs.values())


