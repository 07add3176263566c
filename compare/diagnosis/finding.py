"""Findings of a diagnosis: mistakes that explain layers, other close ones, and unexplained blame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from compare.diagnosis.mistake import Value
from compare.diagnosis.naming import LIMITS
from compare.diagnosis.search import SearchOutcome
from compare.diagnosis.trial import Score
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Blame

# ρ on its own input from which a site is wrong that no comparison blames and no mistake explains: a right port may sum
# in BF16, or round once more.
_CLEARLY_WRONG = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MistakeFinding:
    """A mistake, or two together, held against one layer, or against a site outside the layers.

    Args:
        layer: The layer; None outside the layers.
        mistake: Its name; of two `a + b`.
        parameters: Its parameters; `rows` is `decode` where it is made in decoded rows alone. Of two mistakes each
            name begins with its mistake's, as in `rope_theta.theta`.
        explains: Share of the error's energy that it takes away; 0 where it adds some.
        leaves: ρ that it leaves: about 1 is what BF16 leaves.
        amplitude: The port's error along the one that is predicted; near 1 where it is right.
        z: The amplitude in units of its own uncertainty.
        what: What the port does, in a sentence.
        look_at: What to look at in the port's code.
        sources: Public threads that report it.
        resembles: Mistakes that explain the layer as well: nothing in these captures tells them apart.
    """

    layer: int | None
    mistake: str
    parameters: Mapping[str, Value]
    explains: float
    leaves: float
    amplitude: float
    z: float
    what: str
    look_at: str
    sources: tuple[str, ...] = ()
    resembles: tuple[str, ...] = ()

    @classmethod
    def of(cls, layer: int, score: Score, *, alike: tuple[Score, ...] = ()) -> MistakeFinding:
        """Build the finding of a score, beside others that explain as much."""
        mistakes, name = score.hypothesis.mistakes, score.hypothesis.name
        others = (other.hypothesis.name for other in alike)
        return cls(
            layer=layer,
            mistake=name,
            parameters=MappingProxyType(dict(_parameters(score))),
            explains=max(score.explains, 0.0),
            leaves=score.leaves,
            amplitude=score.amplitude,
            z=score.z,
            what=" ".join(mistake.what for mistake in mistakes),
            look_at="; ".join(mistake.look_at for mistake in mistakes),
            sources=tuple(source for mistake in mistakes for source in mistake.sources),
            resembles=tuple(dict.fromkeys(other for other in others if other != name)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDiagnosis:
    """Findings in one layer, or at one site outside the layers.

    Args:
        unexplained: ρ of the port without a mistake: of a layer at the worst of its sites, of a site on the port's own
            input to it.
        is_blamed: Whether the comparison blames it.
        named: The mistakes that explain it, best first; those behind the first resemble it.
        nearest: What comes nearest where nothing explains it, best first.
        num_hypotheses: How many were tried.
    """

    unexplained: float
    is_blamed: bool = True
    named: tuple[MistakeFinding, ...] = ()
    nearest: tuple[MistakeFinding, ...] = ()
    num_hypotheses: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDiagnosis(PartDiagnosis):
    """Findings in one layer, and the sites that judged it."""

    layer: int
    sites: tuple[Site, ...]

    @property
    def is_right(self) -> bool:
        """True where nothing is to explain: it is not blamed, and its error is that of a right layer."""
        return not self.named and not self.is_blamed and self.unexplained <= LIMITS.leaves

    @classmethod
    def of(
        cls,
        layer: int,
        outcome: SearchOutcome,
        *,
        sites: tuple[Site, ...],
        is_blamed: bool,
        notes: tuple[str, ...],
    ) -> LayerDiagnosis:
        """Build the diagnosis of a layer from the outcome of its search."""
        return cls(
            layer=layer,
            sites=sites,
            unexplained=outcome.null.leaves,
            named=tuple(MistakeFinding.of(layer, score, alike=outcome.named) for score in outcome.named),
            nearest=tuple(MistakeFinding.of(layer, score) for score in outcome.nearest),
            num_hypotheses=outcome.num_tried,
            is_blamed=is_blamed,
            notes=notes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDiagnosis(PartDiagnosis):
    """Findings at one site outside the layers."""

    site: ModelSite

    @property
    def is_right(self) -> bool:
        """True where the site is right on the port's own input; unless it is blamed, it may be a little off."""
        limit = LIMITS.leaves if self.is_blamed else _CLEARLY_WRONG
        return not self.named and self.unexplained <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A whole diagnosis.

    Args:
        is_failed: Whether the comparison of the chosen layers fails.
        layers: What was found of each layer that was looked at, ascending.
        sites: The same of each site outside the layers.
        unexplained: What the comparison blames and no named mistake explains.
    """

    reference: str
    target: str
    is_failed: bool
    layers: tuple[LayerDiagnosis, ...]
    sites: tuple[SiteDiagnosis, ...] = ()
    unexplained: tuple[Blame, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[MistakeFinding, ...]:
        """The mistakes that were named, best first: of the embedding, of the layers ascending, of norm and head."""
        first = [site.named for site in self.sites if site.site is ModelSite.EMBEDDING]
        behind = [site.named for site in self.sites if site.site is not ModelSite.EMBEDDING]
        within = [layer.named for layer in self.layers]
        return tuple(finding for named in (*first, *within, *behind) for finding in named)

    @property
    def exit_code(self) -> int:
        """1 where the port differs, named or not; else 0."""
        is_wrong = any(not site.is_right for site in self.sites)
        return int(self.is_failed or is_wrong or bool(self.findings))


def _parameters(score: Score) -> Iterator[tuple[str, Value]]:
    hypothesis = score.hypothesis
    for mistake, parameters in zip(hypothesis.mistakes, hypothesis.parameters, strict=True):
        for name, value in parameters.items():
            yield (name if len(hypothesis.mistakes) == 1 else f"{mistake.name}.{name}"), value
    if score.is_decode_only:
        yield "rows", "decode"
