"""LayerSearch: the mistakes that explain one layer of a run, cause by cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from compare.catalogue.candidates import values_of
from compare.catalogue.mistake import Hypothesis, Mistake
from compare.comparer import JudgedRun
from compare.diagnosis.finding import LayerDiagnosis, MistakeFinding
from compare.diagnosis.layer_case import LayerCase, comparable_sites
from compare.diagnosis.score import Score
from compare.diagnosis.search import SearchOutcome, search_layer
from compare.sides.golden_weights import GoldenWeights
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import scaled
from minimax_tools.reference.right_stages import sites_behind
from minimax_tools.results.results import Blame
from reports.wording import word_figure

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
        return suspects if suspects & self._shown else suspects | sites_behind(suspects)

    @cached_property
    def _shown(self) -> frozenset[Site]:
        return comparable_sites(self.golden, self.run.sides.target, self.layer)

    def _own_sites(self, suspects: frozenset[Site]) -> frozenset[Site]:
        """Return the sites before a cause, if another one lies there: the port computed with what these hold."""
        blamed = {Site(blame.sites[-1]) for blame in self.blame}
        if not sites_behind(blamed - suspects) & suspects:
            return frozenset()
        return self._shown - suspects - sites_behind(suspects)

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
    return frozenset(Site(site) for blame in cause for site in blame.sites)
