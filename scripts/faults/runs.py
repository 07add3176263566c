"""Runs: which ports run on which scene, and what becomes of each: cases, one for every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from faults.cases import Case
from faults.effects import measure_effects
from faults.judging import as_black_box, judge_layers
from faults.naming import name_mistake
from faults.plant import Plant
from faults.port import PlantedPort
from faults.rivals import find_differences
from faults.running import run_port, run_ranks
from faults.scene import Scene, Stage
from minimax_tools.capture.reader import Capture
from minimax_tools.sites import Site
from neuron.devices.runtime import Runtime
from neuron.ports.targets import find_target

DECODE_ROWS = 4
_TRANSFORMERS = ("EagerAttention", "EagerExperts", "Eager", "BatchedExperts", "Same")
_EXAMPLE = Path(__file__).parents[1] / "examples" / "transformers_port.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One port over all layers of a stage.

    Args:
        stage: The stage.
        port: `planted`, `ranks of N`, or a target as mm2-test names it.
        backend: `cpu` or `xla-cpu`.
        plant: What is planted, in the stage's early, middle and last layer; None for nothing.
        decodes: Whether rows are decoded, the mistake limited to them.
        names: Whether the diagnosis is asked, of the middle layer, which mistake it is.
    """

    stage: Stage
    port: str
    backend: str
    plant: Plant | None = None
    decodes: bool = False
    names: bool = False

    @property
    def rows(self) -> str:
        """Of what it computes."""
        return "decode" if self.decodes else "prefill"

    def __str__(self) -> str:
        return f"{self.stage.name}: {self.plant or Path(self.port).name} on {self.backend}, {self.rows}"


def plan_plants(
    stage: Stage, plants: tuple[Plant, ...], *, backend: str, names: bool = False
) -> Iterator[PlannedRun]:
    """Every plant that shows on a stage, and none; with `names` the diagnosis is asked which it is."""
    yield PlannedRun(stage=stage, port="planted", backend=backend)
    for plant in plants:
        if plant.shows_on(padding_side=stage.padding_side, has_far_positions=stage.has_far_positions):
            yield PlannedRun(stage=stage, port="planted", backend=backend, plant=plant, names=names)


def plan_decoding(stage: Stage, plants: tuple[Plant, ...]) -> Iterator[PlannedRun]:
    """Every plant that can be limited to decoded rows, and none, on the CPU."""
    for plant in (None, *plants):
        if plant is None or plant.decodes:
            yield PlannedRun(stage=stage, port="planted", backend="cpu", plant=plant, decodes=True)


def plan_clean(stage: Stage, *, backends: tuple[str, ...], ranks: tuple[int, ...]) -> Iterator[PlannedRun]:
    """The ports that are right: mm2's two layers and this port on every backend, transformers' and several ranks."""
    for backend in backends:
        for port in ("builtin", "reference", "planted"):
            yield PlannedRun(stage=stage, port=port, backend=backend)
    for name in _TRANSFORMERS:
        yield PlannedRun(stage=stage, port=f"{_EXAMPLE}:{name}", backend="cpu")
    for degree in ranks:
        yield PlannedRun(stage=stage, port=f"ranks of {degree}", backend="cpu")


def carry_out(planned: PlannedRun, scene: Scene, *, runtime: Runtime, directory: Path) -> tuple[Case, ...]:
    """Run, judge with all sites and with the output alone, and ask the other rules."""
    capture = _capture(planned, scene, runtime=runtime, directory=directory)
    shown = judge_layers(scene, capture)
    alone = judge_layers(scene, as_black_box(capture))
    decode_rows = DECODE_ROWS if planned.decodes else 0
    asked = scene.layers[len(scene.layers) // 2] if planned.names else None
    cases = []
    for layer in capture.layers:
        plant = planned.plant if layer in scene.layers else None
        effects = _measure_effects(scene, layer, plant, decode_rows) if plant else {}
        cases.append(
            Case(
                run=str(planned),
                stage=planned.stage.name,
                port=Path(planned.port).name,
                backend=planned.backend,
                rows=planned.rows,
                layer=layer,
                kind=str(plant.kind) if plant else "right",
                mistake=plant.name if plant else "",
                parameters=dict(plant.parameters) if plant and not plant.halves else {},
                sites=tuple(str(site) for site in plant.sites) if plant else (),
                halves=tuple(tuple(map(str, half.sites)) for half in plant.halves) if plant else (),
                effects={str(site): effect for site, effect in effects.items()},
                failed=shown[layer].failed,
                warned=shown[layer].warned,
                blamed=shown[layer].blamed,
                reason=shown[layer].reason,
                black_box_detected=alone[layer].is_detected,
                rivals=find_differences(scene.golden, capture, layer),
                named=name_mistake(scene, capture, layer) if layer == asked else None,
            )
        )
    return tuple(cases)


def _measure_effects(scene: Scene, layer: int, plant: Plant, decode_rows: int) -> dict[Site, float]:
    """Of a pair, what each mistake changes by itself where it lives."""
    if not plant.halves:
        return measure_effects(scene, layer, plant, decode_rows=decode_rows)
    effects: dict[Site, float] = {}
    for half in plant.halves:
        alone = measure_effects(scene, layer, half, decode_rows=decode_rows)
        effects |= {site: alone[site] for site in half.sites}
    return effects


def _capture(planned: PlannedRun, scene: Scene, *, runtime: Runtime, directory: Path) -> Capture:
    if planned.port.startswith("ranks of "):
        return run_ranks(scene, tp_degree=int(planned.port.removeprefix("ranks of ")), directory=directory)
    if planned.port != "planted":
        return run_port(scene, find_target(planned.port), runtime=runtime, directory=directory)
    layers = frozenset(scene.layers) if planned.plant else frozenset()
    port = PlantedPort(plant=planned.plant, layers=layers, decode_only=planned.decodes)
    decode_rows = DECODE_ROWS if planned.decodes else 0
    return run_port(scene, port.target(), runtime=runtime, directory=directory, decode_rows=decode_rows)
