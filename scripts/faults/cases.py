"""Cases: one layer of one run, or one chained run in one view, as it was judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimax_tools.results.results import Verdict

# The view of a chained run with all its sites.
WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedCase:
    """The run of a case, and the mistake that was planted.

    Args:
        run: The run in words.
        stage: Name of the baseline.
        kind: `catalogued`, `uncatalogued`, `pair`, `equivalent`, or `right` if nothing was planted.
        mistake: Name of the plant; empty if there is none.
        parameters: Parameters of the plant.
        sites: Sites of the mistake: wrong although their inputs are right.
        effects: Change by the mistake in float32 over the golden's noise floor, by site.
        reason: Reason of the first blame or failure, or why the run cannot be compared.
        model: Folder name of the trained model; empty for a synthetic one.
        verdict: Verdict on the whole run.
    """

    run: str
    stage: str
    kind: str = "right"
    mistake: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    effects: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    model: str = ""
    verdict: str = ""

    @property
    def is_mistake(self) -> bool:
        """True if the layer is wrong."""
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
    """A layer of a run, as it was judged.

    Args:
        port: The port in words.
        backend: Device of the run.
        rows: `prefill`, or `decode` if some rows were decoded.
        layer: The layer.
        halves: Sites of each mistake of a pair.
        failed: Sites that mm2 fails.
        warned: Sites that it warns of.
        blamed: The sets of sites that it blames.
        black_box_detected: Whether mm2 fails the layer by its output alone.
        rivals: Sites that each rule of another tool calls different.
        akin: Names that the diagnosis has for the same computation.
        black_box_verdict: Verdict on the outputs alone.
        excess: Largest ratio of a figure to its limit, by site; infinite if the site fails for another reason, such as
            its shape.
        black_box_excess: The same of the output alone.
        named: Mistakes that the diagnosis names by the output alone, best first, as `(name, parameters)`; None if
            it was not asked.
    """

    port: str
    backend: str
    rows: str
    layer: int
    halves: tuple[tuple[str, ...], ...] = ()
    failed: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    blamed: tuple[tuple[str, ...], ...] = ()
    black_box_detected: bool = False
    rivals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    named: tuple[tuple[str, Mapping[str, Any]], ...] | None = None
    akin: tuple[str, ...] = ()
    black_box_verdict: str = ""
    excess: Mapping[str, float] = field(default_factory=dict)
    black_box_excess: float = 0.0

    @property
    def is_right(self) -> bool:
        """True if the layer is right."""
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
        """True if the model was trained."""
        return bool(self.model)

    @property
    def largest_excess(self) -> float:
        """Largest figure over its limit at any site; above 1 the layer fails."""
        return max(self.excess.values(), default=0.0)

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
        return (
            f"{self.word_mistake(self.port)}, {self.stage}, layer {self.layer}, {self.rows}, {self.backend}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpCase(PlantedCase):
    """A chained run, as it was judged in one view.

    Args:
        view: Sites that were shown: `whole`, `no_experts`, `outputs`, or the tool that wrote it.
        has_checkpoint: Whether the checkpoint was at hand.
        layer: Layer of the mistake; None if there is none.
        shown: Sites of that layer that the view shows.
        blamed: Layers and sites that mm2 blames; None is the model outside its layers.
    """

    view: str
    has_checkpoint: bool
    layer: int | None = None
    shown: tuple[str, ...] = ()
    blamed: tuple[tuple[int | None, tuple[str, ...]], ...] = ()

    @property
    def effect(self) -> float:
        """Largest effect that the view can show: at the sites of the mistake, or at the layer's output.

        The effect at the output counts up to that at the sites: flipped experts, which noise causes too, enlarge it.
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
        checkpoint = "with" if self.has_checkpoint else "without"
        return f"{self.word_mistake('right')}, {self.stage}, layer {self.layer}, {self.view}, {checkpoint} checkpoint"
