"""Cases: a layer of a run, or a whole chained run in one view, with what was planted and what mm2 said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimax_tools.results.results import Verdict

# Name of the view of a chained run that shows all its sites.
WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedCase:
    """The run of a case, and the mistake that was planted."""

    run: str  # the run in words
    baseline: str  # name of the baseline: the model, prompts and golden of the run
    kind: str = "right"  # `catalogued`, `uncatalogued`, `pair`, `equivalent`; or `right`: nothing was planted
    mistake: str = ""  # name of the plant; empty if there is none
    parameters: Mapping[str, Any] = field(default_factory=dict)  # parameters of the plant
    sites: tuple[str, ...] = ()  # sites of the mistake: wrong although their inputs are right
    # Size of the mistake by site: its change in float32, over the golden's noise floor. At 1 it equals the noise.
    effects: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""  # reason of the first blame or failure, or why the run cannot be compared
    model: str = ""  # folder name of the trained model; empty for a synthetic one
    verdict: str = ""  # verdict on the whole run

    @property
    def is_mistake(self) -> bool:
        """True if one mistake was planted; a pair counts apart."""
        return self.kind in ("catalogued", "uncatalogued")

    @property
    def is_passed(self) -> bool:
        """True if the whole run ends with exit code 0."""
        return bool(self.verdict) and Verdict(self.verdict).exit_code == 0

    def word_mistake(self, if_right: str) -> str:
        """Word the mistake and its parameters; `if_right` is the word for a right port."""
        parameters = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.mistake}({parameters})" if parameters else self.mistake or if_right


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(PlantedCase):
    """A layer of a run, as it was judged: with all sites shown, and as a black box, by its output alone."""

    port: str  # the port in words
    backend: str  # device of the run
    rows: str  # `prefill`, or `decode` if the last tokens were decoded
    layer: int
    halves: tuple[tuple[str, ...], ...] = ()  # sites of each mistake of a pair
    failed: tuple[str, ...] = ()  # sites that mm2 fails
    warned: tuple[str, ...] = ()  # sites that it warns of
    # Of each blame its site, after those not compared before it.
    blamed: tuple[tuple[str, ...], ...] = ()
    black_box_detected: bool = False  # whether mm2 fails the layer as a black box
    # Sites that another tool's rule calls different, by the name of the rule in `rivals`.
    rivals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Mistakes that the diagnosis names for the black box, as `(name, parameters)`, best first; None if not asked.
    named: tuple[tuple[str, Mapping[str, Any]], ...] | None = None
    akin: tuple[str, ...] = ()  # `Plant.akin`: names that count as right answers beside the mistake's own
    black_box_verdict: str = ""  # verdict on the whole run as a black box
    # Largest ratio of a figure to its limit, by site; infinite if the site fails for another reason, such as its shape.
    excess: Mapping[str, float] = field(default_factory=dict)
    black_box_excess: float = 0.0  # the same of the output, as a black box

    @property
    def is_right(self) -> bool:
        """True if the layer computes the right output."""
        return self.kind in ("right", "equivalent")

    @property
    def effect(self) -> float:
        """Largest effect at the sites of the mistake."""
        return max((self.effects.get(site, 0.0) for site in self.sites), default=0.0)

    @property
    def is_above_floor(self) -> bool:
        """True if the mistake changes more than the noise floor at one of its sites."""
        return self.is_mistake and self.effect >= 1.0

    @property
    def is_distinguishable(self) -> bool:
        """True if the mistake changes the layer's output by more than the noise floor."""
        return self.is_mistake and self.effects.get("output", 0.0) >= 1.0

    @property
    def is_pair_above_floor(self) -> bool:
        """True if each mistake of a pair changes more than the noise floor at one of its sites."""
        return bool(self.halves) and all(
            max(self.effects.get(site, 0.0) for site in sites) >= 1.0 for sites in self.halves
        )

    @property
    def blamed_sites(self) -> set[str]:
        """Sites that are blamed, of all sets."""
        return {site for sites in self.blamed for site in sites}

    @property
    def is_pair_blamed(self) -> bool:
        """True if sites of both mistakes of a pair are blamed, and nothing else is."""
        return self.is_site_named and all(self.blamed_sites & set(sites) for sites in self.halves)

    @property
    def is_detected(self) -> bool:
        """True if mm2 fails the layer."""
        return bool(self.failed or self.blamed)

    @property
    def is_alarmed(self) -> bool:
        """True if mm2 fails the layer, with all sites shown or by its output alone."""
        return self.is_detected or self.black_box_detected

    @property
    def is_blame_confined(self) -> bool:
        """True if no site is blamed but those of the mistake."""
        return self.blamed_sites <= set(self.sites)

    @property
    def is_learned(self) -> bool:
        """True if the model is a trained one, not a synthetic one."""
        return bool(self.model)

    @property
    def is_site_named(self) -> bool:
        """True if sites of the mistake are blamed, and nothing else is."""
        return bool(self.blamed_sites) and self.is_blame_confined

    @property
    def is_named(self) -> bool:
        """True if the diagnosis names the mistake, alone or among others."""
        return any(name in (self.mistake, *self.akin) for name, _ in self.named or ())

    @property
    def is_named_first(self) -> bool:
        """True if the diagnosis names the mistake first."""
        return bool(self.named and self.named[0][0] == self.mistake)

    def __str__(self) -> str:
        return f"{self.word_mistake(self.port)}, {self.baseline}, layer {self.layer}, {self.rows}, {self.backend}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpCase(PlantedCase):
    """A chained run, as it was judged in one view."""

    view: str  # sites that were shown: `whole`, `no_experts`, `outputs`, or the tool whose dump shows them
    has_checkpoint: bool  # whether mm2 had the golden's checkpoint, with which it judges more
    layer: int | None = None  # layer of the mistake; None if there is none
    shown: tuple[str, ...] = ()  # sites of that layer that the view shows
    # Layers and sites that mm2 blames. The layer None is the model outside its layers.
    blamed: tuple[tuple[int | None, tuple[str, ...]], ...] = ()

    @property
    def effect(self) -> float:
        """Largest effect that the view can show: at the sites of the mistake, or at the layer's output.

        The effect at the output counts only up to that at the sites: the rest is flipped experts, as noise causes too.
        """
        at_sites = {site: self.effects.get(site, 0.0) for site in self.sites}
        shown = [effect for site, effect in at_sites.items() if site in self.shown]
        if "output" in self.shown:
            shown.append(min(self.effects.get("output", 0.0), max(at_sites.values(), default=0.0)))
        return max(shown, default=0.0)

    @property
    def is_above_floor(self) -> bool:
        """True if the view shows a change beyond the noise floor."""
        return self.is_mistake and self.effect >= 1.0

    @property
    def is_detected(self) -> bool:
        """True if mm2 fails the run."""
        return self.verdict == Verdict.FAIL

    @property
    def is_layer_named(self) -> bool:
        """True if the wrong layer is blamed, and no other is."""
        return {layer for layer, _ in self.blamed} == {self.layer}

    @property
    def is_site_named(self) -> bool:
        """True if sites of the mistake are blamed, and nothing else is."""
        named = {site for _, sites in self.blamed for site in sites}
        return self.is_layer_named and named <= set(self.sites)

    def __str__(self) -> str:
        with_ = "with" if self.has_checkpoint else "without"
        return f"{self.word_mistake('right')}, {self.baseline}, layer {self.layer}, {self.view}, {with_} checkpoint"
