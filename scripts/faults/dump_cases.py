"""Dump case: one chained run of a whole model with a mistake in one layer, as it was judged in one view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimax_tools.results.results import Verdict

# The view of a run with all its sites.
WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpCase:
    """A chained run, as it was judged in one view.

    Args:
        run: The run in words.
        stage: Name of the scene.
        view: Sites that were shown: `whole`, `no_experts`, `outputs`, or the tool that wrote it.
        has_checkpoint: Whether the checkpoint was at hand.
        verdict: Verdict on the run.
        kind: Kind as in `Case`.
        layer: Layer of the mistake; None where there is none.
        mistake: Name of the plant; empty where there is none.
        parameters: Parameters of the plant.
        sites: Sites of the mistake: wrong although their inputs are right.
        shown: Sites of that layer that the view shows.
        effects: Change in float32 over the noise floor, by site.
        blamed: Layers and sites that mm2 blames; None is the model outside its layers.
        reason: Reason of the first blame, or of not being comparable.
        model: Folder name of the trained model; empty for a synthetic one.
    """

    run: str
    stage: str
    view: str
    has_checkpoint: bool
    verdict: str
    kind: str = "right"
    layer: int | None = None
    mistake: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    effects: Mapping[str, float] = field(default_factory=dict)
    blamed: tuple[tuple[int | None, tuple[str, ...]], ...] = ()
    reason: str = ""
    model: str = ""

    @property
    def is_mistake(self) -> bool:
        """True where a layer is wrong."""
        return self.kind in ("catalogued", "uncatalogued")

    @property
    def effect(self) -> float:
        """Largest effect that the view can show: at the sites of the mistake, or at the layer's output.

        The effect at the output counts up to that at the sites: flipped experts, which noise causes too, enlarge it.
        """
        own = {site: self.effects.get(site, 0.0) for site in self.sites}
        seen = [effect for site, effect in own.items() if site in self.shown]
        if "output" in self.shown:
            seen.append(min(self.effects.get("output", 0.0), max(own.values(), default=0.0)))
        return max(seen, default=0.0)

    @property
    def is_above_floor(self) -> bool:
        """True where the view shows a change beyond the noise floor."""
        return self.is_mistake and self.effect >= 1.0

    @property
    def is_passed(self) -> bool:
        """True where mm2-compare would end with exit code 0."""
        return Verdict(self.verdict).exit_code == 0

    @property
    def is_detected(self) -> bool:
        """True where mm2 fails the run."""
        return self.verdict == Verdict.FAIL

    @property
    def is_layer_named(self) -> bool:
        """True where the wrong layer is blamed, and no other is."""
        return {layer for layer, _ in self.blamed} == {self.layer}

    @property
    def is_site_named(self) -> bool:
        """True where sites of the mistake are blamed, and nothing else is."""
        named = {site for _, sites in self.blamed for site in sites}
        return self.is_layer_named and named <= set(self.sites)

    def __str__(self) -> str:
        parameters = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        what = f"{self.mistake or 'right'}({parameters})" if parameters else self.mistake or "right"
        checkpoint = "with" if self.has_checkpoint else "without"
        return f"{what}, {self.stage}, layer {self.layer}, {self.view}, {checkpoint} checkpoint"
