"""Case: one layer of one run, as it was judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimax_tools.results.results import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layer of a run, as it was judged.

    Args:
        run: The run in words: scene, port, backend and rows.
        stage: Name of the scene.
        port: The port in words.
        backend: Device of the run.
        rows: `prefill`, or `decode` where some rows were decoded.
        layer: The layer.
        kind: `catalogued`, `uncatalogued`, `pair`, `equivalent`, or `right` where nothing was planted in this layer.
        mistake: Name of the plant; empty where there is none.
        parameters: Parameters of the plant.
        sites: Sites of the mistake: wrong although their inputs are right.
        halves: Sites of each mistake of a pair.
        effects: Change in float32 over the noise floor, by site.
        failed: Sites that mm2 fails.
        warned: Sites that it warns of.
        blamed: The sets of sites that it blames.
        reason: Reason of the first blame or failure.
        black_box_detected: Whether mm2 fails the layer by its output alone.
        rivals: Sites that each rule of another tool calls different.
        akin: Other names of the diagnosis for the same computation.
        model: Folder name of the trained model; empty for a synthetic one.
        verdict: Verdict on the whole run.
        black_box_verdict: Verdict on the outputs alone.
        excess: Largest figure over its limit, by site; infinite where the site fails by something else than noise,
            such as another shape.
        black_box_excess: Largest figure over its limit, of the output alone.
        named: Mistakes that the diagnosis names by the output alone, best first, as `(name, parameters)`; None where
            it was not asked.
    """

    run: str
    stage: str
    port: str
    backend: str
    rows: str
    layer: int
    kind: str = "right"
    mistake: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    halves: tuple[tuple[str, ...], ...] = ()
    effects: Mapping[str, float] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    blamed: tuple[tuple[str, ...], ...] = ()
    reason: str = ""
    black_box_detected: bool = False
    rivals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    named: tuple[tuple[str, Mapping[str, Any]], ...] | None = None
    akin: tuple[str, ...] = ()
    model: str = ""
    verdict: str = ""
    black_box_verdict: str = ""
    excess: Mapping[str, float] = field(default_factory=dict)
    black_box_excess: float = 0.0

    @property
    def is_mistake(self) -> bool:
        """True where the layer is wrong."""
        return self.kind in ("catalogued", "uncatalogued")

    @property
    def is_right(self) -> bool:
        """True where the layer is right."""
        return self.kind in ("right", "equivalent")

    @property
    def effect(self) -> float:
        """Largest effect at the sites of the mistake."""
        return max((self.effects.get(site, 0.0) for site in self.sites), default=0.0)

    @property
    def is_above_floor(self) -> bool:
        """True where the mistake changes more than the noise floor at one of its sites."""
        return self.is_mistake and self.effect >= 1.0

    @property
    def is_distinguishable(self) -> bool:
        """True where the mistake changes the layer's output by more than the noise floor."""
        return self.is_mistake and self.effects.get("output", 0.0) >= 1.0

    @property
    def is_pair_above_floor(self) -> bool:
        """True where each mistake of a pair changes more than the noise floor at one of its sites."""
        return bool(self.halves) and all(
            max(self.effects.get(site, 0.0) for site in sites) >= 1.0 for sites in self.halves
        )

    @property
    def is_pair_named(self) -> bool:
        """True where both mistakes of a pair are blamed at their sites, and nothing else is."""
        named = {site for sites in self.blamed for site in sites}
        return self.is_site_named and all(named & set(sites) for sites in self.halves)

    @property
    def is_detected(self) -> bool:
        """True where mm2 fails the layer."""
        return bool(self.failed or self.blamed)

    @property
    def is_alarmed(self) -> bool:
        """True where mm2 fails the layer, with all sites shown or by its output alone."""
        return self.is_detected or self.black_box_detected

    @property
    def is_nothing_else_blamed(self) -> bool:
        """True where no site is blamed but those of the mistake."""
        return {site for sites in self.blamed for site in sites} <= set(self.sites)

    @property
    def is_learned(self) -> bool:
        """True where the model was trained."""
        return bool(self.model)

    @property
    def is_passed(self) -> bool:
        """True where the whole run ends with exit code 0."""
        return bool(self.verdict) and Verdict(self.verdict).exit_code == 0

    @property
    def largest_excess(self) -> float:
        """Largest figure over its limit at any site; above 1 the layer fails."""
        return max(self.excess.values(), default=0.0)

    @property
    def is_site_named(self) -> bool:
        """True where sites of the mistake are blamed, and nothing else is."""
        named = {site for sites in self.blamed for site in sites}
        return bool(named) and named <= set(self.sites)

    @property
    def is_named(self) -> bool:
        """True where the diagnosis names the mistake, alone or among others."""
        return any(name in (self.mistake, *self.akin) for name, _ in self.named or ())

    @property
    def is_named_first(self) -> bool:
        """True where the diagnosis names the mistake first."""
        return bool(self.named) and self.named is not None and self.named[0][0] == self.mistake

    def __str__(self) -> str:
        parameters = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        what = f"{self.mistake}({parameters})" if parameters else self.mistake or self.port
        return f"{what}, {self.stage}, layer {self.layer}, {self.rows}, {self.backend}"
