"""Case: one layer of one run as it was judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimax_tools.results.results import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer of one run.

    Args:
        run: What ran: stage, port, backend and rows, in words.
        stage: The scene's name.
        port: The port in words.
        backend: Where it ran.
        rows: `prefill`, or `decode` where some rows were decoded.
        layer: The layer.
        kind: `catalogued`, `uncatalogued`, `pair`, `equivalent`, or `right` where nothing was planted in this layer.
        mistake: The plant's name; empty where there is none.
        parameters: Its parameters.
        sites: Where it lives.
        halves: Of a pair, where each of its mistakes lives.
        effects: At each site, what it changes in float32 over the noise floor.
        failed: Sites that mm2 fails.
        warned: Sites that it warns of.
        blamed: The sets of sites that it blames.
        reason: Why.
        black_box_detected: Whether it fails the layer by its output alone.
        rivals: The sites that each other rule calls different.
        akin: Other names that state the same computation.
        model: The folder's name of a model that was trained; empty for a synthetic one.
        verdict: What mm2 concludes of the whole run.
        black_box_verdict: The same of the outputs alone.
        excess: At each site, the largest share of a limit that a figure comes to; infinite where the site fails by
            what no limit of noise decides, such as another shape.
        black_box_excess: The same of the output alone.
        named: What the diagnosis says of the output alone, best first, as `[name, parameters]`; None where it was
            not asked.
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
        """Whether the layer is wrong."""
        return self.kind in ("catalogued", "uncatalogued")

    @property
    def is_right(self) -> bool:
        """Whether nothing in it is wrong."""
        return self.kind in ("right", "equivalent")

    @property
    def effect(self) -> float:
        """The largest effect at the sites where it lives."""
        return max((self.effects.get(site, 0.0) for site in self.sites), default=0.0)

    @property
    def is_above_floor(self) -> bool:
        """Whether it changes more than BF16 costs, where it lives."""
        return self.is_mistake and self.effect >= 1.0

    @property
    def is_distinguishable(self) -> bool:
        """Whether the layer's output changes by more than BF16 costs it."""
        return self.is_mistake and self.effects.get("output", 0.0) >= 1.0

    @property
    def is_pair_above_floor(self) -> bool:
        """Whether each of two mistakes changes more than BF16 costs, where it lives."""
        return bool(self.halves) and all(
            max(self.effects.get(site, 0.0) for site in sites) >= 1.0 for sites in self.halves
        )

    @property
    def is_pair_named(self) -> bool:
        """Whether both of two mistakes are blamed where they live, and nothing else is."""
        named = {site for sites in self.blamed for site in sites}
        return self.is_site_named and all(named & set(sites) for sites in self.halves)

    @property
    def is_detected(self) -> bool:
        """Whether mm2 fails the layer."""
        return bool(self.failed or self.blamed)

    @property
    def is_alarmed(self) -> bool:
        """Return whether mm2 fails the layer, with all sites shown or by its output alone."""
        return self.is_detected or self.black_box_detected

    @property
    def is_nothing_else_blamed(self) -> bool:
        """Return whether no site is blamed but those where it lives."""
        return {site for sites in self.blamed for site in sites} <= set(self.sites)

    @property
    def is_learned(self) -> bool:
        """Return whether its weights were learned, and not drawn by chance."""
        return bool(self.model)

    @property
    def is_passed(self) -> bool:
        """Return whether the run that it belongs to ends with exit code 0."""
        return bool(self.verdict) and Verdict(self.verdict).exit_code == 0

    @property
    def largest_excess(self) -> float:
        """The largest share of a limit at any of its sites; beyond 1 it fails."""
        return max(self.excess.values(), default=0.0)

    @property
    def is_site_named(self) -> bool:
        """Whether what is blamed is where it lives, and nothing else."""
        named = {site for sites in self.blamed for site in sites}
        return bool(named) and named <= set(self.sites)

    @property
    def is_named(self) -> bool:
        """Whether the diagnosis names the mistake, be it among others that explain the output as well."""
        return any(name in (self.mistake, *self.akin) for name, _ in self.named or ())

    @property
    def is_named_first(self) -> bool:
        """Whether it names the mistake before all others."""
        return bool(self.named) and self.named is not None and self.named[0][0] == self.mistake

    def __str__(self) -> str:
        parameters = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        what = f"{self.mistake}({parameters})" if parameters else self.mistake or self.port
        return f"{what}, {self.stage}, layer {self.layer}, {self.rows}, {self.backend}"
