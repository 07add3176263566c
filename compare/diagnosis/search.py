"""The search: the hypotheses of a layer's causes, screened on some tokens, fitted, and judged on all of them.

Of all parameters of a mistake, the best alone is kept, once for all tokens and once for decoded ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from compare.catalogue.candidates import values_of
from compare.catalogue.mistake import Hypothesis, Mistake
from compare.comparer import JudgedRun
from compare.diagnosis.finding import LayerDiagnosis, MistakeFinding
from compare.diagnosis.layer_case import LayerCase, comparable_sites
from compare.diagnosis.score import (
    CLEAR_RHO,
    FAINT_RHO,
    Score,
    best_first,
    describe_port,
    is_explanation,
    is_proof,
    name_mistakes,
)
from compare.diagnosis.screening import (
    is_single_factor,
    judge_faint,
    judge_finalists,
    judge_proved,
    judge_survivors,
    leads_somewhere,
    most_alike,
    open_first,
    open_screen,
    step_factors,
)
from compare.diagnosis.trial import Trial
from compare.sides.golden_weights import GoldenWeights
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.graph import LayerGraph
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import scaled
from minimax_tools.reference.right_stages import sites_behind
from minimax_tools.results.results import Blame
from reports.wording import word_figure

logger = logging.getLogger(__name__)

# Mistakes that lead to a pair: those with such a likeness or share of the error, the best few. Each is paired with what
# resembles the rest of the error most, in its direction, and in the tokens that it is of.
_LEAD, _MOST_LEADS = 0.2, 4
_MOST_LIKE_REST, _MOST_ON_ITS_TOKENS = 12, 12
# Mean ρ² that one mistake of a pair alone leaves, at least, in units of what both leave.
_LEAST_OF_HALF = 2.0
# As many as a report shows.
_MOST_NEAREST = 3
# Distance from 1 of a factor that no code multiplies by: an epsilon, a rounding or a norm elsewhere acts like one; and
# of one that rounding to BF16 gives.
_NEAR_ONE, _ROUNDED_ONE = 0.02, 2**-9
# Sites of which the catalogue has no mistake that is a factor.
_SITES = (
    *(Site.INPUT_NORM, Site.Q_ROPE, Site.K_ROPE, Site.ATTN_CONTEXT, Site.ATTN_RESIDUAL),
    *(Site.POST_NORM, Site.ROUTER_LOGITS, Site.OUTPUT),
)

DESCRIPTIONS = tuple(
    Mistake(
        name=f"{site} scaled",
        build=partial(scaled, site),
        candidates=values_of("factor", 0.9, 1.1),
        fitted="factor",
        is_factor=True,
        is_named=False,
    )
    for site in _SITES
)

# The blame of one cause; () for a layer that is not blamed.
Cause = tuple[Blame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """Outcome of the search in one layer."""

    null: Score  # score of the null hypothesis: the layer without a mistake
    named: tuple[Score, ...] = ()  # scores that explain the layer, best first: the later resemble the first
    description: Score | None = None  # factor on a site that explains the layer, where no mistake does
    # The best scores of turns 1 to 4, best first, if nothing explains the layer.
    nearest: tuple[Score, ...] = ()
    num_tried: int = 0  # number of hypotheses that were tried, without fitted values
    # Mistakes that were tried and do not resemble the error in any way.
    hopeless: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """Hypotheses that are tried together."""

    hypotheses: Sequence[Hypothesis]
    is_expected: bool = False  # whether they are of mistakes that explained other layers


def search_layer(
    trial: Trial,
    mistakes: Sequence[Mistake],
    *,
    suspects: frozenset[Site],
    expected: Sequence[Hypothesis],
    is_seen: bool = False,
    tries_pairs: bool = True,
) -> SearchOutcome:
    """Find the mistakes that explain a layer, or the sites of one cause.

    Hypotheses are tried in turns, until one explains the layer:

    1. mistakes that explained other layers
    2. mistakes whose parameters the port's values give
    3. mistakes that begin at a blamed site
    4. all other mistakes, if no site is blamed, or its error is so small that another site may hide it
    5. those of the tried mistakes that the noise may cover
    6. mistakes whose parameters the port's values give after a longer search
    7. pairs of mistakes, where one leads somewhere, if `tries_pairs`

    Hypotheses are first scored on a few tokens. Where the error is large, one that these prove is judged on all tokens
    at once, and ends the search if all prove it too.

    The trial is on all tokens. `suspects` are blamed sites; empty if none is known. `expected` are the mistakes that
    explained other layers of this run, with the parameters that were fitted there. With `is_seen`, wrong weights were
    seen that explain the error: turns 1 to 3 may name them, and end the search.
    """
    search = _Search(trial, suspects=suspects, is_seen=is_seen, tries_pairs=tries_pairs)
    if bool(trial.is_usable.any()):
        search.run(mistakes, expected)
    return search.outcome


class _Search:
    """The search of one cause: what was tried, and what explains it."""

    def __init__(self, trial: Trial, *, suspects: frozenset[Site], is_seen: bool, tries_pairs: bool) -> None:
        self._trial = trial
        self._suspects = suspects
        self._is_seen = is_seen
        self._tries_pairs = tries_pairs
        self._null = trial.null()
        self._screen = open_screen(trial)
        self._first, self._is_provable = open_first(trial, self._null)
        self._num_tried = 0
        self._on_first: list[Score] = []
        self._on_screen: list[Score] = []
        self._of_experts: list[Score] = []  # hypotheses of experts that the port's values gave, on all tokens
        self._finals: list[Score] = []
        self._named: tuple[Score, ...] = ()
        self._description: Score | None = None

    @property
    def outcome(self) -> SearchOutcome:
        """Findings of the search."""
        finals = [score for score in self._finals if score.hypothesis.is_named]
        nearest = sorted(best_first(finals), key=lambda score: score.explains, reverse=True)
        return SearchOutcome(
            null=self._null,
            named=self._named,
            nearest=() if self._named else tuple(nearest[:_MOST_NEAREST]),
            description=self._description,
            num_tried=self._num_tried,
            hopeless=frozenset(score.hypothesis.name for score in self._on_first)
            - frozenset(
                score.hypothesis.name for score in self._on_first if leads_somewhere(score) or score.is_silent
            ),
        )

    def run(self, mistakes: Sequence[Mistake], expected: Sequence[Hypothesis]) -> None:
        """Try hypotheses in turns, until one explains the cause."""
        for turn in self._turns(mistakes, expected):
            if self._is_settled or (turn.hypotheses and self._try_turn(turn)):
                return
        # Still there only if nothing but expected mistakes was tried: then no proof is needed.
        if self._settle(self._finals) or self._is_seen or self._settle(self._judge_faint()):
            return
        # Of an error that is not clear, nothing more can be told.
        if self._null.leaves >= CLEAR_RHO:
            self._judge_found(mistakes, at_last=True)
            if self._tries_pairs and not self._is_settled:
                self._try_pairs()

    @property
    def _is_settled(self) -> bool:
        return bool(self._named) or self._description is not None

    def _turns(self, mistakes: Sequence[Mistake], expected: Sequence[Hypothesis]) -> Iterator[_Turn]:
        names = {hypothesis.name for hypothesis in expected}
        by_name = [mistake for mistake in mistakes if mistake.name in names]
        listed = _listed(self._trial, by_name)
        yield _Turn(
            # The catalogue's candidates come first: a value that was fitted elsewhere must explain more than they do.
            hypotheses=self._possible([*listed, *expected]),
            is_expected=True,
        )
        found = self._judge_found(mistakes)
        rest = [*_listed(self._trial, [mistake for mistake in mistakes if mistake.name not in names]), *found]
        at_suspects = [hypothesis for hypothesis in rest if hypothesis.sites & self._suspects]
        yield _Turn(hypotheses=self._possible(at_suspects))
        if not self._suspects or (self._null.unexplained <= FAINT_RHO and not self._is_seen):
            chosen = set(map(id, at_suspects))
            yield _Turn(hypotheses=self._possible([one for one in rest if id(one) not in chosen]))

    def _possible(self, hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
        return [hypothesis for hypothesis in hypotheses if not self._first.refutes(hypothesis)]

    def _judge_found(self, mistakes: Sequence[Mistake], *, at_last: bool = False) -> list[Hypothesis]:
        """Judge on all tokens what the port's values give of the experts; return what they give of attention."""
        clues = self._trial.clues
        found = [one for mistake in mistakes for one in mistake.found_hypotheses(clues, at_last=at_last)]
        if self._suspects:
            found = [hypothesis for hypothesis in found if hypothesis.sites & self._suspects]
        of_experts = [hypothesis for hypothesis in found if not hypothesis.is_of_attention]
        self._num_tried += len(of_experts)
        scores = self._trial.judge(of_experts)
        self._of_experts += scores
        self._finals += scores
        if any(score.hypothesis.has_number for score in name_mistakes(self._finals)):
            self._finals += self._judge_factors(mistakes)
        self._settle(self._finals, needs_proof=not at_last)
        return [hypothesis for hypothesis in found if hypothesis.is_of_attention]

    def _judge_factors(self, mistakes: Sequence[Mistake]) -> list[Score]:
        """Judge on all tokens the factors on a site: what takes a number for each expert must beat the best one."""
        factors = [
            hypothesis
            for mistake in mistakes
            if mistake.is_factor
            for hypothesis in mistake.hypotheses(self._trial.base.inputs)[:1]
            if not self._suspects or hypothesis.sites & self._suspects
        ]
        return step_factors(self._trial, self._trial.judge(factors))

    def _try_turn(self, turn: _Turn) -> bool:
        """Try the hypotheses of a turn; return whether one explains the cause."""
        self._num_tried += len(turn.hypotheses)
        logger.info("Trying %d hypotheses on %d tokens.", len(turn.hypotheses), len(self._first.base.tokens))
        scores = self._first.judge(turn.hypotheses, keeps_predicted=True)
        proved = judge_proved(self._trial, self._first, scores) if self._is_provable else []
        if proved and self._settle([*proved, *self._finals], needs_proof=True):
            return True
        self._on_first += scores
        self._on_screen += judge_survivors(self._first, self._screen, scores)
        self._finals = [*judge_finalists(self._trial, self._screen, self._on_screen), *self._of_experts]
        # A mistake of another layer must be proved here, as others of this layer have not been tried yet.
        return self._settle(self._finals, needs_proof=turn.is_expected)

    def _settle(self, scores: Sequence[Score], *, needs_proof: bool = False) -> bool:
        """Take the names, or the description, that explain the cause; return whether there are any."""
        named = tuple(score for score in name_mistakes(scores) if not self._is_mere_factor(score))
        description = describe_port(scores)
        best = named[0] if named else description
        if best is None or (needs_proof and not is_proof(best)):
            return False
        self._named, self._description = named, description
        return True

    def _is_mere_factor(self, score: Score) -> bool:
        """Decide whether a factor so near 1 was fitted that much else looks like it.

        A site that the port does not show is off by little for many reasons; one that it shows, by rounding.
        """
        hypothesis = score.hypothesis
        if not (is_single_factor(score) and hypothesis.is_fitted):
            return False
        is_shown = bool(hypothesis.sites & set(self._trial.yardsticks))
        factor = hypothesis.parameters[0][str(hypothesis.mistakes[0].fitted)]
        return isinstance(factor, float) and abs(factor - 1.0) < (_ROUNDED_ONE if is_shown else _NEAR_ONE)

    def _judge_faint(self) -> list[Score]:
        """Score mistakes that the noise may cover (see `Trial.judge_faint`); none if the error is far above it."""
        if self._null.leaves > FAINT_RHO:
            return []
        return judge_faint(self._trial, self._screen, [*self._on_first, *self._on_screen, *self._finals])

    def _try_pairs(self) -> None:
        pairs = _pair_up(self._first.error, self._on_first)
        if pairs:
            self._num_tried += len(pairs)
            logger.info("Trying %d pairs of mistakes on %d tokens.", len(pairs), len(self._first.base.tokens))
            survivors = judge_survivors(self._first, self._screen, self._first.judge(pairs))
            finals = judge_finalists(self._trial, self._screen, survivors)
            self._settle([score for score in finals if self._needs_both(score)])

    def _needs_both(self, pair: Score) -> bool:
        """Decide whether each mistake of a pair that may be named takes a good part of the error away."""
        if not is_explanation(pair):
            return False
        halves = [
            mistake.with_parameters(parameters)
            for mistake, parameters in zip(pair.hypothesis.mistakes, pair.hypothesis.parameters, strict=True)
        ]
        return all(
            score.misfit >= _LEAST_OF_HALF * pair.misfit and score.is_worse_than(pair.misfits)
            for score in self._trial.judge(halves)
            if score.is_decode_only == pair.is_decode_only
        )


def _listed(trial: Trial, mistakes: Sequence[Mistake]) -> list[Hypothesis]:
    return [hypothesis for mistake in mistakes for hypothesis in mistake.hypotheses(trial.base.inputs)]


def _pair_up(error: torch.Tensor, scores: Sequence[Score]) -> list[Hypothesis]:
    """Pair mistakes that may have happened together: one that leads somewhere, and what the rest of the error is like.

    `error` is the port's, in units of noise, on the tokens of the scores: [n].
    """
    singles = [
        score
        for score in scores
        if not score.is_decode_only and len(score.hypothesis.mistakes) == 1 and score.hypothesis.is_named
    ]
    pairs: dict[tuple[int, int], Hypothesis] = {}
    for lead in _find_leads(singles):
        others = [score for score in singles if _may_go_together(lead.hypothesis, score.hypothesis)]
        rest = error - lead.predicted.float()
        by_direction = sorted(others, key=lambda score: _alike(rest, score.predicted.float()), reverse=True)
        by_tokens = sorted(
            others, key=lambda score: _alike(lead.misfits.nan_to_num(0.0), score.energies), reverse=True
        )
        partners = [*best_first(by_direction[:_MOST_LIKE_REST]), *best_first(by_tokens[:_MOST_ON_ITS_TOKENS])]
        for other in partners:
            first, second = sorted((lead.hypothesis, other.hypothesis), key=_begin)
            pairs.setdefault((id(first), id(second)), first.and_also(second))
    return list(pairs.values())


def _find_leads(scores: Sequence[Score]) -> list[Score]:
    """Return the mistakes that take a good part of the error away, or resemble it, the best first."""
    ranked = [score for score in best_first(scores) if max(score.likeness, score.explains) >= _LEAD]
    half = _MOST_LEADS // 2
    return list(dict.fromkeys([*ranked[:half], *most_alike(ranked, _MOST_LEADS)]))[:_MOST_LEADS]


def _may_go_together(first: Hypothesis, second: Hypothesis) -> bool:
    """Decide whether two mistakes begin at different sites, and show beside each other.

    A mistake that reads the right layer does not show another one on its side of the layer. Two numbers that are both
    fitted explain too much: a scale before a norm, and another epsilon in it, are one.
    """
    if all(one.mistakes[0].fitted for one in (first, second)):
        return False
    reads = any(mistake.reads_right_layer for mistake in (*first.mistakes, *second.mistakes))
    is_one_side = first.is_of_attention == second.is_of_attention
    return not first.sites & second.sites and not (reads and is_one_side)


def _begin(hypothesis: Hypothesis) -> int:
    return min(site.order for site in hypothesis.sites)


def _alike(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the squared cosine of two vectors; 0 if one is zero, or not finite."""
    energies = float(first.square().sum() * second.square().sum())
    return float((first * second).sum()) ** 2 / energies if 0.0 < energies < math.inf else 0.0


_Found = tuple[Cause, LayerCase, SearchOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedCause:
    """Findings on a cause, or of several that one mistake explains."""

    diagnosis: LayerDiagnosis
    hopeless: frozenset[str]  # names of mistakes that do not resemble the error in any way


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSearch:
    """Searches the mistakes of one layer."""

    run: JudgedRun
    golden: CaptureSource
    layer: int
    weights: GoldenWeights
    blame: tuple[Blame, ...]  # all blame of the layer's sites
    in_vain: frozenset[Cause] = (
        frozenset()
    )  # causes like one of another layer that no pair of mistakes explains

    def explain(
        self, causes: Mapping[Cause, Sequence[Mistake]], *, expected: dict[str, Hypothesis]
    ) -> tuple[ExplainedCause, ...]:
        """Explain the causes of the layer by the mistakes to try on each.

        A cause is judged on what the port fed its sites. Mistakes that explained other layers, `expected`, are tried
        first; those that are found here are added. Causes that one mistake explains are told together.
        """
        found: list[_Found] = []
        for cause, mistakes in causes.items():
            case, outcome = self._search(cause, mistakes, expected)
            # The parameters that were fitted last are the likeliest in the next layer.
            expected |= {score.hypothesis.name: score.hypothesis for score in outcome.named}
            found.append((cause, case, outcome))
        return tuple(
            ExplainedCause(diagnosis=self._diagnosis(*part), hopeless=part[2].hopeless)
            for part in self._join(found)
        )

    def _join(self, found: Sequence[_Found]) -> Iterator[_Found]:
        """Judge together the causes that one mistake explains."""
        groups: dict[str, list[_Found]] = {}
        for number, part in enumerate(found):
            named = part[2].named
            groups.setdefault(named[0].hypothesis.name if named else str(number), []).append(part)
        for parts in groups.values():
            if len(parts) > 1:
                cause = tuple(blame for part in parts for blame in part[0])
                hypothesis = parts[0][2].named[0].hypothesis
                case, outcome = self._search(cause, hypothesis.mistakes, {hypothesis.name: hypothesis})
                if outcome.named:
                    yield cause, case, outcome
                    continue
            yield from parts

    def _search(
        self, cause: Cause, mistakes: Sequence[Mistake], expected: dict[str, Hypothesis]
    ) -> tuple[LayerCase, SearchOutcome]:
        suspects = self._widened(_sites(cause))
        case = LayerCase(
            self.golden,
            self.run.sides.target,
            weights=self.weights,
            layer=self.layer,
            suspects=suspects,
            is_inherited=self.run.inputs[self.layer].is_inherited,  # its input carries errors of other layers
            own=self._own_sites(suspects),
        )
        outcome = search_layer(
            case.open_trial(),
            (*mistakes, *DESCRIPTIONS),
            suspects=suspects,
            expected=tuple(expected.values()),
            is_seen=bool(cause) and all(blame.is_of_weights for blame in cause),
            tries_pairs=cause not in self.in_vain,
        )
        return case, outcome

    def _widened(self, suspects: frozenset[Site]) -> frozenset[Site]:
        """Add the sites behind suspects of which none can be judged, such as one of another shape."""
        return suspects if suspects & self._shown else suspects | sites_behind(self._graph, suspects)

    @cached_property
    def _graph(self) -> LayerGraph:
        return self.golden.graph.layer(self.layer)

    @cached_property
    def _shown(self) -> frozenset[Site]:
        return comparable_sites(self.golden, self.run.sides.target, self.layer)

    def _own_sites(self, suspects: frozenset[Site]) -> frozenset[Site]:
        """Return the sites before a cause, if another one lies there: the port computed with what these hold."""
        blamed = {Site(blame.sites[-1]) for blame in self.blame}
        if not sites_behind(self._graph, blamed - suspects) & suspects:
            return frozenset()
        return self._shown - suspects - sites_behind(self._graph, suspects)

    def _diagnosis(self, cause: Cause, case: LayerCase, outcome: SearchOutcome) -> LayerDiagnosis:
        spec, named = case.inputs.spec, outcome.named
        # A named mistake says where to look; without a name, the place of the error is all that is known.
        notes = case.notes if named else (*case.notes, *self._word_regions(_sites(cause)))
        if outcome.description is not None:
            notes = (*notes, _word_description(outcome.description))
        return LayerDiagnosis(
            layer=self.layer,
            sites=case.sites,
            blame=cause,
            unexplained=outcome.null.leaves,  # ρ without a mistake
            is_blamed=bool(cause),
            named=tuple(MistakeFinding.of(self.layer, score, spec=spec, alike=named) for score in named),
            nearest=tuple(MistakeFinding.of(self.layer, score, spec=spec) for score in outcome.nearest),
            num_hypotheses=outcome.num_tried,
            notes=notes,
        )

    def _word_regions(self, suspects: frozenset[Site]) -> Iterator[str]:
        for result in self.run.comparison.of_layer(self.layer):
            if not suspects or Site(result.site) in suspects:
                for sentence in result.where:
                    yield f"{result.site}: {sentence}"


def _word_description(score: Score) -> str:
    (site,), (parameters,) = score.hypothesis.sites, score.hypothesis.parameters
    return (
        f"a plain factor explains it, and no known mistake does: {site} × {parameters['factor']:.4g} leaves "
        f"ρ {word_figure(score.leaves)} of {word_figure(score.unexplained)}"
    )


def _sites(cause: Cause) -> frozenset[Site]:
    sites = frozenset(Site(site) for blame in cause for site in blame.sites)
    # Beside shared experts, a mistake of the routed ones is told at the sum of both.
    return sites | {Site.MOE_DELTA} if Site.ROUTED_DELTA in sites else sites
