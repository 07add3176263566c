"""Runs of ports over all layers of a scene, from the plan to one case per layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import port_runs

from faults.cases import Case
from faults.effects import measure_effects
from faults.judging import as_black_box, judge_run, name_mistake
from faults.plant import Plant
from faults.port import PlantedPort
from faults.rivals import find_differences
from faults.scene import Scene, SceneRequest
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from neuron.devices.runtime import Runtime
from neuron.ports.target import Target
from neuron.ports.targets import find_target

DECODE_ROWS = 4
RANKS = "ranks of "


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A port over all layers of a scene.

    Args:
        port: `planted`, `ranks of N`, or a target as mm2-test names it.
        backend: `cpu` or `xla-cpu`.
        plant: The mistake, in the early, middle and last layer; None for a right port.
        decodes: Whether rows are decoded, and the mistake is limited to them.
        names: Whether the diagnosis is asked for the mistake of the middle layer.
    """

    request: SceneRequest
    port: str
    backend: str
    plant: Plant | None = None
    decodes: bool = False
    names: bool = False

    @property
    def rows(self) -> str:
        """Kind of the rows that it computes."""
        return "decode" if self.decodes else "prefill"

    @property
    def decode_rows(self) -> int:
        """Number of rows of each prompt that are decoded."""
        return DECODE_ROWS if self.decodes else 0

    def __str__(self) -> str:
        return f"{self.request.name}: {self.plant or Path(self.port).name} on {self.backend}, {self.rows}"


def plan_plants(
    request: SceneRequest, plants: tuple[Plant, ...], *, backend: str, names: bool = False
) -> Iterator[PlannedRun]:
    """Plan a right port, and each plant that can show; with `names` the diagnosis is asked for it."""
    yield PlannedRun(request=request, port="planted", backend=backend)
    for plant in plants:
        if plant.prefills and shows_on(plant, request):
            yield PlannedRun(request=request, port="planted", backend=backend, plant=plant, names=names)


def plan_decoding(request: SceneRequest, plants: tuple[Plant, ...]) -> Iterator[PlannedRun]:
    """Plan a right port, and each plant that can be limited to decoded rows, on the CPU."""
    for plant in (None, *plants):
        if plant is None or (plant.decodes and shows_on(plant, request)):
            yield PlannedRun(request=request, port="planted", backend="cpu", plant=plant, decodes=True)


def shows_on(plant: Plant, request: SceneRequest) -> bool:
    """Decide whether a plant can show on a scene, by the padding and positions of its rows, and FP8 weights."""
    is_padded = request.padding_side == "left" or not plant.needs_left_padding
    is_far = request.has_far_positions or not plant.needs_far_positions
    return is_padded and is_far and (request.is_fp8 or not plant.needs_fp8)


def carry_out(planned: PlannedRun, scene: Scene, *, runtime: Runtime, directory: Path) -> tuple[Case, ...]:
    """Run a port, judge it with all sites and with the output alone, and apply the other rules."""
    capture = _capture(planned, scene, runtime=runtime, directory=directory)
    shown = judge_run(scene, capture)
    alone = judge_run(scene, as_black_box(capture))
    asked = scene.layers[len(scene.layers) // 2] if planned.names else None
    cases = []
    for layer in capture.layers:
        plant = planned.plant if layer in scene.layers else None
        seen = shown.layers[layer]
        effects = _measure_effects(scene, layer, plant, planned.decode_rows) if plant else {}
        cases.append(
            Case(
                run=str(planned),
                stage=planned.request.name,
                port=Path(planned.port).name,
                backend=planned.backend,
                rows=planned.rows,
                layer=layer,
                **(plant.record if plant else {}),
                halves=tuple(tuple(map(str, half.sites)) for half in plant.halves) if plant else (),
                effects={str(site): effect for site, effect in effects.items()},
                failed=seen.failed,
                warned=seen.warned,
                blamed=seen.blamed,
                reason=seen.reason,
                black_box_detected=alone.layers[layer].is_detected,
                rivals=find_differences(scene.golden, capture, layer),
                named=name_mistake(scene, capture, layer) if layer == asked else None,
                akin=plant.akin if plant else (),
                model=planned.request.model_name,
                verdict=shown.verdict,
                black_box_verdict=alone.verdict,
                excess=seen.excess,
                black_box_excess=max(alone.layers[layer].excess.values(), default=0.0),
            )
        )
    return tuple(cases)


def run_port(
    scene: Scene, target: Target, *, runtime: Runtime, directory: Path, decode_rows: int = 0
) -> Capture:
    """Sweep all layers in this process, and decode the last `decode_rows` rows; `directory` is emptied first."""
    run = sweep_run(Span(0, scene.spec.num_hidden_layers), sites_level="all").decoding(decode_rows)
    return port_runs.run_port(
        scene.golden, target, run, reader=scene.reader, runtime=runtime, directory=directory
    )


def _measure_effects(scene: Scene, layer: int, plant: Plant, decode_rows: int) -> dict[Site, float]:
    """Measure the effects of a plant; those of a pair are each mistake's own, at its sites."""
    if not plant.halves:
        return measure_effects(scene, layer, plant, decode_rows=decode_rows)
    effects: dict[Site, float] = {}
    for half in plant.halves:
        alone = measure_effects(scene, layer, half, decode_rows=decode_rows)
        effects |= {site: alone[site] for site in half.sites}
    return effects


def _capture(planned: PlannedRun, scene: Scene, *, runtime: Runtime, directory: Path) -> Capture:
    if planned.port.startswith(RANKS):
        return port_runs.run_on_ranks(
            "sweep",
            scene.folder,
            scene.golden,
            tp_degree=int(planned.port.removeprefix(RANKS)),
            backend=planned.backend,
            directory=directory,
        )
    if planned.port != "planted":
        return run_port(scene, find_target(planned.port), runtime=runtime, directory=directory)
    layers = frozenset(scene.layers) if planned.plant else frozenset()
    port = PlantedPort(plant=planned.plant, layers=layers, decode_only=planned.decodes)
    return run_port(
        scene, port.target(), runtime=runtime, directory=directory, decode_rows=planned.decode_rows
    )
