"""Findings of a diagnosis: mistakes that explain layers, other close ones, and unexplained blame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from compare.blame.blame import group_blame
from compare.blame.operations import join_findings, join_operation
from compare.catalogue.candidates import Value
from compare.comparer import JudgedRun
from compare.diagnosis.proof import MistakeProof
from compare.diagnosis.score import Score
from compare.noise.yardstick import RIGHT_RHO
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.families.minimax_m2 import MINIMAX_M2
from minimax_tools.model.formulas import formula
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import SHARED_OPERATIONS, ModelSite, Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.results import Blame, Comparison, Untested, Verdict

# ρ from which a site outside the layers counts as wrong although the comparison does not blame it. It is far above 1,
# since a right port may sum in BF16, or round once more.
_CLEARLY_WRONG = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MistakeFinding:
    """A mistake, or two together, as tried on one layer, or on a site outside the layers.

    `parameters` holds `rows`: `decode` if only decoded tokens are wrong. With two mistakes, each name begins with the
    mistake, as in `rope_theta.theta`.
    """

    layer: int | None  # None outside the layers
    mistake: str  # name of the mistake; `a + b` for two
    parameters: Mapping[str, Value]
    explains: float  # share of the error's energy that the mistake takes away; 0 if it adds some
    leaves: float  # ρ of the port against the mistake; BF16 noise alone leaves about 1
    amplitude: float  # factor on the predicted error that fits the port's best; near 1 if the name is right
    z: float  # the amplitude in units of its own uncertainty
    what: str  # sentence that says what the port does
    look_at: str  # place to look at in the port's code
    # Sites of a layer at which the mistake first shows; of two mistakes those of each.
    begins_at: tuple[tuple[str, ...], ...] = ()
    sources: tuple[str, ...] = ()  # public threads that report the mistake
    resembles: tuple[str, ...] = ()  # mistakes that these captures cannot tell from this one
    proof: MistakeProof | None = None  # outcome of undoing it; None if that was not asked for

    @classmethod
    def of(
        cls, layer: int, score: Score, *, spec: ModelSpec, alike: tuple[Score, ...] = ()
    ) -> MistakeFinding:
        """Build the finding of a score; `alike` are the scores that explain the layer as well, this one included."""
        hypothesis = score.hypothesis
        mistakes, name = hypothesis.mistakes, hypothesis.name
        names = (other.hypothesis.name for other in alike)
        return cls(
            layer=layer,
            mistake=name,
            parameters=MappingProxyType(dict(_parameters(score))),
            explains=max(score.explains, 0.0),
            leaves=score.leaves,
            amplitude=score.amplitude,
            z=score.z,
            what=" ".join(
                mistake.describe(spec, parameters)
                for mistake, parameters in zip(mistakes, hypothesis.parameters, strict=True)
            ),
            look_at="; ".join(mistake.words.of(spec.family).look_at for mistake in mistakes),
            begins_at=tuple(
                tuple(str(site) for site in Site if site in mistake.with_parameters(parameters).sites)
                for mistake, parameters in zip(mistakes, score.hypothesis.parameters, strict=True)
            ),
            sources=tuple(source for mistake in mistakes for source in mistake.words.sources),
            resembles=tuple(dict.fromkeys(other for other in names if other != name)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDiagnosis:
    """Findings in one layer, or at one site outside the layers."""

    unexplained: float  # ρ of the port against float32 without a mistake, at the worst of a layer's sites
    is_blamed: bool = True  # whether the comparison blames the layer or the site
    named: tuple[MistakeFinding, ...] = ()  # mistakes that explain the error, best first
    nearest: tuple[MistakeFinding, ...] = ()  # the nearest mistakes, best first, if none explains the error
    num_hypotheses: int = 0  # number of hypotheses that were tried
    notes: tuple[str, ...] = ()  # sentences on what was not tried, or not judged


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDiagnosis(PartDiagnosis):
    """Findings in one layer, and the sites that judged it."""

    layer: int
    sites: tuple[Site, ...]
    blame: tuple[Blame, ...] = ()  # blame of the comparison in this layer
    # Whether it fails by the shape of sites alone, which `notes` tell: then no mistake was tried.
    is_of_shape: bool = False

    @property
    def place(self) -> tuple[tuple[str, ...], ...]:
        """The sites of each blame: layers that nothing explains are alike if they share it."""
        return tuple(blame.sites for blame in self.blame)

    @property
    def is_right(self) -> bool:
        """True if the layer is not blamed, and its error is no larger than a right layer's."""
        return not self.named and not self.is_blamed and self.unexplained <= RIGHT_RHO


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDiagnosis(PartDiagnosis):
    """Findings at one site outside the layers."""

    site: ModelSite

    @property
    def is_right(self) -> bool:
        """True if the site is right on the port's own input; a site that is not blamed may be a little off."""
        limit = RIGHT_RHO if self.is_blamed else _CLEARLY_WRONG
        return not self.named and self.unexplained <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """Layers that were not diagnosed, since nothing explains others that are blamed for the same sites."""

    layers: tuple[int, ...]  # the layers that were not diagnosed, ascending
    like: tuple[int, ...]  # the diagnosed layers that they are like


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A whole diagnosis."""

    reference: str  # folder of the golden
    target: str  # folder of the device run
    is_failed: bool  # whether the comparison of the chosen layers fails
    layers: tuple[LayerDiagnosis, ...]  # diagnoses of the layers that were looked at, ascending
    model_type: str = MINIMAX_M2.model_type  # the model's family, and what its layers compute
    graph: ModelGraph = field(default_factory=ModelGraph)
    sites: tuple[SiteDiagnosis, ...] = ()  # diagnoses of the sites outside the layers
    weights: tuple[
        Blame, ...
    ] = ()  # wrong weights, which explain the sites that read them: no mistake is searched
    unexplained_blame: tuple[Blame, ...] = ()  # other blame of the comparison that no named mistake explains
    passed_over: tuple[PassedOver, ...] = ()  # layers that are like others, which nothing explains
    notes: tuple[str, ...] = ()  # sentences on layers and sites that were not diagnosed
    # How much the comparison saw, if it found no difference and proves nothing, as `compared 13 of 68 sites`.
    unproved: str = ""
    untested: tuple[Untested, ...] = ()  # what the comparison has not looked at

    @property
    def has_wrong_weights(self) -> bool:
        """True if wrong weights, which were seen, explain something: nothing need prove them."""
        return bool(self.weights) or any(
            blame.is_of_weights for layer in self.layers for blame in layer.blame
        )

    def formula(self, site: Site | ModelSite) -> str:
        """Return what the original computes at a site, in words."""
        return FAMILIES[self.model_type].retell(formula(site, self.graph))

    @property
    def findings(self) -> tuple[MistakeFinding, ...]:
        """The named mistakes in the model's order: embedding, layers, final norm, logits; in each place best first."""
        before = [site for site in self.sites if site.site is ModelSite.EMBEDDING]
        behind = [site for site in self.sites if site.site is not ModelSite.EMBEDDING]
        return tuple(finding for part in (*before, *self.layers, *behind) for finding in part.named)

    @property
    def verdict(self) -> Verdict:
        """Fail if the port differs, whether its mistake is named or not; else as the comparison: pass if it proves."""
        is_wrong = any(not site.is_right for site in self.sites)
        if self.is_failed or is_wrong or self.findings:
            return Verdict.FAIL
        return Verdict.INCOMPARABLE if self.unproved else Verdict.PASS

    @property
    def exit_code(self) -> int:
        """The verdict's exit code."""
        return self.verdict.exit_code


def _parameters(score: Score) -> Iterator[tuple[str, Value]]:
    hypothesis = score.hypothesis
    for mistake, parameters in zip(hypothesis.mistakes, hypothesis.parameters, strict=True):
        for name, value in parameters.items():
            yield (name if len(hypothesis.mistakes) == 1 else f"{mistake.name}.{name}"), value
    if score.is_decode_only:
        yield "rows", "decode"


def confirm_causes(run: JudgedRun, diagnosis: Diagnosis) -> Comparison:
    """Return a run's comparison, in which the sites that one named mistake explains are one cause."""
    comparison = run.comparison
    blame = comparison.blame
    for operation, sites in SHARED_OPERATIONS.items():
        explained = [layer.layer for layer in diagnosis.layers if _begins_at(layer.named[:1], sites)]
        blame = join_operation(blame, operation, explained)
    if blame == comparison.blame:
        return comparison
    return replace(
        comparison,
        blame=blame,
        blame_groups=group_blame(blame, (*comparison.sites, *run.recomputed)),
        findings=join_findings(comparison.findings, blame),
    )


def _begins_at(named: Sequence[MistakeFinding], sites: tuple[Site, Site]) -> bool:
    return any(set(sites) <= set(begins) for finding in named for begins in finding.begins_at)
