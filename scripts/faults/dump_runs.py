"""Chained runs of the planted port over a whole model, as dumps of other tools show them.

In a chained run each layer computes on the output of the layer before. A mistake is planted in one layer from the third
on, so that layers before it are right and layers behind it compute on wrong inputs. A view is a choice of the sites
that a tool may dump.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from port_runs import run_port

from compare.comparer import compare_captures
from compare.sides.golden_weights import CheckpointWeights
from faults.baseline import Baseline, BaselineRequest
from faults.cases import WHOLE, DumpCase
from faults.effects import measure_effects
from faults.foreign import TOOL, dump_as_vllm_neuron
from faults.judging import as_black_box, default_criteria, hide_sites
from faults.plant import Plant
from faults.port import PlantedPort
from faults.runs import may_show
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import IncomparableError
from minimax_tools.model.run import full_run
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Verdict
from neuron.devices.runtime import Runtime

# The first layer in which a mistake is planted.
_FIRST_LAYER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDump:
    """A chained run of the planted port over a whole model."""

    request: BaselineRequest  # description of the baseline
    plant: Plant | None = None  # the mistake; None for a right port
    layer: int | None = None  # layer of the mistake; None for a right port

    @property
    def backend(self) -> str:
        """Device of the run."""
        return "cpu"

    def __str__(self) -> str:
        return f"{self.request.name}: {self.plant or 'right'} in layer {self.layer}, chained"


def plan_dumps(request: BaselineRequest, plants: Sequence[Plant]) -> Iterator[PlannedDump]:
    """Plan a right port, and each plant that may show, in a random layer; plan nothing if the model is too short."""
    layers = range(_FIRST_LAYER, request.num_layers)
    if not layers:
        return
    yield PlannedDump(request=request)
    for plant in plants:
        if plant.prefills and may_show(plant, request):
            layer = random.Random(f"{request.seed} {plant}").choice(layers)
            yield PlannedDump(request=request, plant=plant, layer=layer)


def carry_out_dump(
    planned: PlannedDump, baseline: Baseline, *, runtime: Runtime, directory: Path
) -> tuple[DumpCase, ...]:
    """Run the whole model, and judge each view of it with the checkpoint and without."""
    plant, layer = planned.plant, planned.layer
    layers = frozenset() if layer is None else frozenset({layer})
    capture = run_port(
        baseline.golden,
        PlantedPort(plant=plant, layers=layers).target(),
        full_run(baseline.spec.num_hidden_layers, sites_level="all"),
        reader=baseline.reader,
        runtime=runtime,
        directory=directory,
    )
    effects = {} if plant is None or layer is None else measure_effects(baseline, layer, plant)
    cases = []
    for view, source in _open_views(capture, baseline.golden, directory.with_name("dump")):
        for has_checkpoint in (True, False):
            verdict, blamed, reason = _judge(baseline, source, has_checkpoint=has_checkpoint)
            cases.append(
                DumpCase(
                    run=str(planned),
                    baseline=planned.request.name,
                    view=view,
                    has_checkpoint=has_checkpoint,
                    verdict=str(verdict),
                    layer=layer,
                    **(plant.record if plant else {}),
                    shown=() if layer is None else tuple(str(site) for site in source.sites(layer)),
                    effects={str(site): effect for site, effect in effects.items()},
                    blamed=blamed,
                    reason=reason,
                    model=planned.request.model_name,
                )
            )
    return tuple(cases)


def _open_views(capture: Capture, golden: Capture, directory: Path) -> Iterator[tuple[str, CaptureSource]]:
    """Yield the views in which the run is judged, by name: the names of `DumpCase.view`."""
    yield WHOLE, capture
    yield "no_experts", hide_sites(capture, [Site.ROUTER_EXPERTS])
    yield "outputs", as_black_box(capture)
    shutil.rmtree(directory, ignore_errors=True)
    yield TOOL, dump_as_vllm_neuron(capture, golden, directory)


def _judge(
    baseline: Baseline, source: CaptureSource, *, has_checkpoint: bool
) -> tuple[Verdict, tuple[tuple[int | None, tuple[str, ...]], ...], str]:
    """Return the verdict, the blamed layers and sites, and the reason of the first blame or why it is incomparable."""
    try:
        comparison = compare_captures(
            baseline.golden,
            source,
            criteria=default_criteria(),
            layer_pattern="layer_*",
            weights=CheckpointWeights(model=str(baseline.folder)) if has_checkpoint else None,
        )
    except IncomparableError as error:
        return Verdict.INCOMPARABLE, (), str(error)
    blamed = tuple((blame.layer, blame.sites) for blame in comparison.blame)
    return comparison.verdict, blamed, comparison.blame[0].reason if comparison.blame else ""
