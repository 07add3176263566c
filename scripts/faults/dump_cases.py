"""Dump case: one whole-model run with a mistake in one layer, as it was judged in one view of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimax_tools.results.results import Verdict

# The view of a run with all its sites.
WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpCase:
    """One chained run in one view.

    Args:
        run: What ran, in words.
        stage: The scene's name.
        view: What of the run was shown: `whole`, `no_experts`, `outputs`, or the tool that wrote it.
        has_checkpoint: Whether the checkpoint was at hand.
        verdict: What mm2 concludes.
        kind: As that of a `Case`.
        layer: Where the mistake is planted; None where there is none.
        mistake: The plant's name; empty where there is none.
        parameters: Its parameters.
        sites: Where it lives.
        shown: Sites of that layer that the view shows.
        effects: At each site, what it changes in float32 over the noise floor.
        blamed: Layers and sites that mm2 blames; None is the model outside its layers.
        reason: Why, or why the two cannot be compared.
        model: The folder's name of a model that was trained; empty for a synthetic one.
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
        """Return whether a layer is wrong."""
        return self.kind in ("catalogued", "uncatalogued")

    @property
    def effect(self) -> float:
        """The largest effect that the view can show: where the mistake lives, or at the layer's output.

        The output shows no more of it than there is: experts that noise exchanges as well show there as much.
        """
        own = {site: self.effects.get(site, 0.0) for site in self.sites}
        seen = [effect for site, effect in own.items() if site in self.shown]
        if "output" in self.shown:
            seen.append(min(self.effects.get("output", 0.0), max(own.values(), default=0.0)))
        return max(seen, default=0.0)

    @property
    def is_above_floor(self) -> bool:
        """Return whether what the view shows of the mistake is more than BF16 costs there."""
        return self.is_mistake and self.effect >= 1.0

    @property
    def is_passed(self) -> bool:
        """Return whether mm2-compare would end with exit code 0."""
        return Verdict(self.verdict).exit_code == 0

    @property
    def is_detected(self) -> bool:
        """Return whether mm2 says that the port differs."""
        return self.verdict == Verdict.FAIL

    @property
    def is_layer_named(self) -> bool:
        """Return whether the wrong layer is blamed, and no other place is."""
        return {layer for layer, _ in self.blamed} == {self.layer}

    @property
    def is_site_named(self) -> bool:
        """Return whether what is blamed is where the mistake lives, and nothing else."""
        named = {site for _, sites in self.blamed for site in sites}
        return self.is_layer_named and named <= set(self.sites)

    def __str__(self) -> str:
        parameters = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        what = f"{self.mistake or 'right'}({parameters})" if parameters else self.mistake or "right"
        checkpoint = "with" if self.has_checkpoint else "without"
        return f"{what}, {self.stage}, layer {self.layer}, {self.view}, {checkpoint} checkpoint"
