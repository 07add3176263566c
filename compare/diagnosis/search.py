"""The search: the hypotheses of one layer, screened on some tokens, fitted, and judged on all of them.

A hypothesis is one or two mistakes with parameters; its name has the mistakes alone. Of its score, `misfit` is the mean
ρ² that it leaves, `leaves` the largest ρ, `explains` the share of the error that it takes away, `likeness` the squared
correlation of its predicted error with the port's, and `z` its certainty.

Of all parameters of a mistake, `best_first` keeps the best alone, once for all tokens and once for decoded ones. The
numbers below count these. A later value replaces an earlier one only if it is clearly better.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compare.diagnosis.fitting import fit_parameters
from compare.diagnosis.layer_case import spread_tokens
from compare.diagnosis.mistake import Hypothesis, Mistake
from compare.diagnosis.naming import CLEAR_RHO, FAINT_RHO, PROOF_RHO, best_first, is_proof, name_mistakes
from compare.diagnosis.score import Score
from compare.diagnosis.trial import Trial
from compare.sides.batch import spread_evenly
from minimax_tools.model.sites import Site

logger = logging.getLogger(__name__)

# Some 390 hypotheses are screened on few tokens: a mistake of attention changes the experts' input, and costs a run of
# all experts. What a layer of true size takes with these numbers stands in BENCHMARKS.md.
_FEWEST_TOKENS, _FIRST_TOKENS, _SCREENING_TOKENS = 8, 24, 64
# Hypotheses that are judged beside one that the fewest tokens prove: up to so many times its misfit, they may be better
# on all tokens.
_NEAR_PROOF = 1.5
# Hypotheses that go from the first tokens to the screening ones: three times the finalists by misfit, all that are
# no worse than no mistake, and a few by likeness, which stays high where a parameter is far off (DECISIONS.md).
_MOST_SURVIVORS = 30
_MOST_ALIKE = 3
# Fitting tries 5 values in 4 to 7 rounds: 6 hypotheses are 120 to 210 trials beside the 390.
_MOST_FITTED = 6
# Hypotheses that are judged on all tokens: the best by misfit, and the best by z, whose error the noise may cover.
_MOST_FINALISTS, _MOST_FAINT = 10, 5
# Mistakes of attention, and of the experts, that are paired: all with all are tens of thousands.
_MOST_PARTNERS = 5
# As many as a report shows.
_MOST_NEAREST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """Outcome of the search in one layer."""

    null: Score  # score of the null hypothesis: the layer without a mistake
    named: tuple[Score, ...] = ()  # scores that explain the layer, best first: the later resemble the first
    # The best scores of turns 1 to 3, best first, if nothing explains the layer.
    nearest: tuple[Score, ...] = ()
    num_tried: int = 0  # number of hypotheses that were tried, without fitted values


def search_layer(
    trial: Trial, mistakes: Sequence[Mistake], *, suspects: frozenset[Site], expected: Sequence[Hypothesis]
) -> SearchOutcome:
    """Find the mistakes that explain a layer.

    Hypotheses are tried in turns, until one explains the layer:

    1. mistakes that explained other layers
    2. mistakes that begin at a blamed site
    3. all other mistakes
    4. those of the tried mistakes that the noise may cover
    5. pairs of mistakes

    Where the error is large, the hypotheses of turns 1 to 3 are first scored on the fewest tokens. One that these
    prove is judged on all tokens, and ends the search if all prove it too.

    The trial is on all tokens. `suspects` are blamed sites; empty if none is known. `expected` are the mistakes that
    explained other layers of this run, with the parameters that were fitted there.
    """
    null = trial.null()
    if not bool(trial.is_usable.any()):
        return SearchOutcome(null=null)
    first, screen = _with_few_tokens(trial, _FIRST_TOKENS), _with_few_tokens(trial, _SCREENING_TOKENS)
    # Only a large error is proved, and only of many tokens do a few spare work.
    fewest = _with_fewest_tokens(trial) if null.leaves >= PROOF_RHO and first is not trial else None
    wrong_tokens = trial.wrong_tokens()
    found = [hypothesis for mistake in mistakes for hypothesis in mistake.found_hypotheses(wrong_tokens)]
    # Few tokens need not hold those of two experts: such hypotheses are judged on all tokens at once.
    of_experts = trial.judge([hypothesis for hypothesis in found if not hypothesis.is_of_attention])
    num_tried = 0
    on_first: list[Score] = []
    on_screen: list[Score] = []
    finals: list[Score] = []
    turns = _turns(first, mistakes, found=found, suspects=suspects, expected=expected)
    for is_expected, hypotheses in turns:
        num_tried += len(hypotheses)
        if fewest is not None:
            proved = _judge_proved(trial, fewest, hypotheses)
            named = name_mistakes([*proved, *(finals or of_experts)]) if proved else ()
            if named and is_proof(named[0]):
                return SearchOutcome(null=null, named=named, num_tried=num_tried)
        logger.info("Trying %d hypotheses on %d tokens.", len(hypotheses), len(first.base.tokens))
        scores = first.judge(hypotheses)
        on_first += scores
        on_screen += _judge_survivors(first, screen, scores)
        finals = [*_judge_finalists(trial, screen, on_screen), *of_experts]
        named = name_mistakes(finals)
        # A mistake of another layer must be proved here, as others of this layer have not been tried yet.
        if named and (not is_expected or is_proof(named[0])):
            return SearchOutcome(null=null, named=named, num_tried=num_tried)
    # Still there only if nothing but expected mistakes was tried: then no proof is needed.
    named = name_mistakes(finals)
    if not named:
        named = name_mistakes(_judge_faint(trial, screen, _hypotheses_of([*on_screen, *finals])))
    # If the error is not clear, a pair cannot be told from a single mistake.
    pairs = [] if named or null.leaves < CLEAR_RHO else _pair_up(on_first)
    if pairs:
        logger.info("Trying %d pairs of mistakes on %d tokens.", len(pairs), len(first.base.tokens))
        survivors = _judge_survivors(first, screen, first.judge(pairs))
        named = name_mistakes(_judge_finalists(trial, screen, survivors))
    nearest = sorted(best_first(finals), key=lambda score: score.explains, reverse=True)[:_MOST_NEAREST]
    return SearchOutcome(
        null=null,
        named=named,
        nearest=() if named else tuple(nearest),
        num_tried=num_tried + len(pairs),
    )


def _with_few_tokens(trial: Trial, most: int) -> Trial:
    """Return the trial of at most about `most` tokens."""
    lengths = trial.base.inputs.is_judged.sum(-1).tolist()
    num_tokens = len(trial.base.tokens)
    indices = spread_tokens(num_tokens, lengths, most)
    return trial if len(indices) == num_tokens else trial.select_tokens(indices)


def _with_fewest_tokens(trial: Trial) -> Trial | None:
    """Return the trial of the fewest tokens, all settled: others do not count; None if there are too few of these."""
    settled = trial.settled.nonzero().flatten()
    if len(settled) < _FEWEST_TOKENS:
        return None
    return trial.select_tokens(settled[spread_evenly(len(settled), _FEWEST_TOKENS)])


def _turns(
    trial: Trial,
    mistakes: Sequence[Mistake],
    *,
    found: Sequence[Hypothesis],
    suspects: frozenset[Site],
    expected: Sequence[Hypothesis],
) -> Iterator[tuple[bool, list[Hypothesis]]]:
    """Yield the turns of `search_layer`, 1 to 3: whether they are the expected hypotheses, and the hypotheses."""
    # The catalogue's candidates come first: a value that was fitted elsewhere must explain more than they do.
    catalogued = [hypothesis for mistake in mistakes for hypothesis in mistake.hypotheses(trial.base.inputs)]
    every = (*catalogued, *found, *expected)
    hypotheses = [hypothesis for hypothesis in every if not trial.refutes(hypothesis)]
    expected_names = {hypothesis.name for hypothesis in expected}
    seen_elsewhere: list[Hypothesis] = []
    at_suspects: list[Hypothesis] = []
    others: list[Hypothesis] = []
    for hypothesis in hypotheses:
        if hypothesis.name in expected_names:
            seen_elsewhere.append(hypothesis)
        elif hypothesis.sites & suspects:
            at_suspects.append(hypothesis)
        else:
            others.append(hypothesis)
    for is_expected, turn in ((True, seen_elsewhere), (False, at_suspects), (False, others)):
        if turn:
            yield is_expected, turn


def _judge_proved(trial: Trial, fewest: Trial, hypotheses: Sequence[Hypothesis]) -> list[Score]:
    """Score on all tokens what the fewest tokens prove, and what is near it; none if they prove nothing."""
    logger.info("Trying %d hypotheses on %d tokens.", len(hypotheses), len(fewest.base.tokens))
    scores = fewest.judge(hypotheses)
    best = min(scores, key=lambda score: score.misfit)
    # A hypothesis may unsettle tokens: with too few left, they say nothing for or against it.
    unjudged = [score for score in scores if math.isinf(score.misfit)]
    if not is_proof(best) or len(unjudged) > _MOST_FINALISTS:
        return []
    near = [score for score in scores if score.misfit <= _NEAR_PROOF * best.misfit]
    return _judge_on_all(trial, list(dict.fromkeys([*near, *unjudged, *_most_alike(scores)])))


def _judge_survivors(first: Trial, screen: Trial, scores: Sequence[Score]) -> list[Score]:
    """Score on the screening tokens the hypotheses that the first tokens do not refute."""
    if first is screen:
        return list(scores)
    ranked = best_first(scores)
    null = first.null().misfit
    names = {score.hypothesis.name for score in ranked[:_MOST_SURVIVORS]}
    names |= {score.hypothesis.name for score in ranked if score.misfit <= null}
    names |= {score.hypothesis.name for score in _most_alike(_with_fitted_parameter(ranked))}
    survivors = _hypotheses_of([score for score in ranked if score.hypothesis.name in names])
    logger.info("Trying the best %d on %d tokens.", len(survivors), len(screen.base.tokens))
    return screen.judge(survivors)


def _judge_finalists(trial: Trial, screen: Trial, scores: Sequence[Score]) -> list[Score]:
    """Fit the parameters of the best scores, and judge them on all tokens."""
    best = best_first(scores)
    faint = sorted(best, key=lambda score: abs(score.z), reverse=True)[:_MOST_FAINT]
    finalists = list(dict.fromkeys([*best[:_MOST_FINALISTS], *faint]))
    if best and not is_proof(best[0]):
        # A parameter that is far off spoils the misfit, but not the direction of the predicted error.
        candidates = [
            *_with_fitted_parameter(best[:_MOST_FITTED]),
            *_most_alike(_with_fitted_parameter(best)),
        ]
        unfitted = list(dict.fromkeys(candidates))
        logger.info("Fitting the parameters of the best %d.", len(unfitted))
        others = [score for score in finalists if score not in unfitted]
        finalists = [*fit_parameters(screen, unfitted), *others]
    return finalists if screen is trial else _judge_on_all(trial, finalists)


def _judge_on_all(trial: Trial, scores: Sequence[Score]) -> list[Score]:
    """Score again, on all tokens, the hypotheses of scores on fewer tokens."""
    logger.info("Judging the best %d on %d tokens.", len(scores), len(trial.base.tokens))
    # `judge` scores each hypothesis in all rows and in decoded ones; only those of both that are asked for count.
    judged = trial.judge(_hypotheses_of(scores))
    wanted = {(id(score.hypothesis), score.is_decode_only) for score in scores}
    return [score for score in judged if (id(score.hypothesis), score.is_decode_only) in wanted]


def _judge_faint(trial: Trial, screen: Trial, hypotheses: Sequence[Hypothesis]) -> list[Score]:
    """Score mistakes that the noise may cover (see `Trial.judge_faint`); none if the error is far above the noise."""
    if trial.null().leaves > FAINT_RHO:
        return []
    logger.info("Trying %d hypotheses as filters.", len(hypotheses))
    screened = best_first(screen.judge_faint(hypotheses))
    best = sorted(screened, key=lambda score: score.z, reverse=True)[:_MOST_FINALISTS]
    chosen = list(dict.fromkeys([*best, *_most_alike(screened)]))
    return chosen if screen is trial else trial.judge_faint(_hypotheses_of(chosen))


def _hypotheses_of(scores: Sequence[Score]) -> list[Hypothesis]:
    """Return the hypotheses of scores, each once though it may have a score of decoded tokens too."""
    return list({id(score.hypothesis): score.hypothesis for score in scores}.values())


def _most_alike(scores: Sequence[Score], most: int = _MOST_ALIKE) -> list[Score]:
    """Return the `most` scores whose predicted error is nearest to the port's in direction, whatever its size."""
    return sorted(scores, key=lambda score: score.likeness, reverse=True)[:most]


def _with_fitted_parameter(scores: Sequence[Score]) -> list[Score]:
    return [score for score in scores if any(mistake.fitted for mistake in score.hypothesis.mistakes)]


def _pair_up(scores: Sequence[Score]) -> list[Hypothesis]:
    """Pair mistakes that may have happened together.

    Mistakes of attention go with mistakes of the experts: the best few of each, and the best with all others. The best
    few of one side go with each other too, if they begin at different sites.
    """
    singles = [score for score in scores if not score.is_decode_only and len(score.hypothesis.mistakes) == 1]
    attention = [score for score in singles if score.hypothesis.is_of_attention]
    experts = [score for score in singles if not score.hypothesis.is_of_attention]
    pairs = [*_pairs_apart(attention), *_pairs_apart(experts)]
    if attention and experts:
        pairs += [(first, second) for first in _partners(attention) for second in _partners(experts)]
        pairs += [(first, best_first(experts)[0]) for first in attention]
        pairs += [(best_first(attention)[0], second) for second in experts]
    unique = {
        (id(first.hypothesis), id(second.hypothesis)): first.hypothesis.and_also(second.hypothesis)
        for first, second in pairs
    }
    return list(unique.values())


def _pairs_apart(scores: Sequence[Score]) -> list[tuple[Score, Score]]:
    """Pair the best few scores of one side of the layer with each other, where they begin at different sites.

    A mistake that reads the right layer is left out: its side would not show the other one.
    """
    may_pair = [score for score in scores if not score.hypothesis.mistakes[0].reads_right_layer]
    partners = dict.fromkeys(_partners(may_pair))
    return [
        (first, second)
        for first, second in itertools.combinations(partners, 2)
        if not first.hypothesis.sites & second.hypothesis.sites
    ]


def _partners(scores: Sequence[Score]) -> list[Score]:
    """Return the best few by misfit, and the best few by likeness."""
    best = best_first(scores)
    return [*best[:_MOST_PARTNERS], *_most_alike(best, _MOST_PARTNERS)]
