"""Runs of ports over all layers of a baseline, from the plan to one case per layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import port_runs

from faults.baseline import Baseline, BaselineRequest
from faults.cases import Case
from faults.effects import measure_effects
from faults.judging import as_black_box, give_fields, judge_run, name_mistake
from faults.plant import Plant
from faults.port import PlantedPort
from faults.rivals import find_differences
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from neuron.devices.runtime import Runtime
from neuron.ports.target import Target
from neuron.ports.targets import find_target

_NUM_DECODE_ROWS = 4
# Name of a port that is mm2's own layer on ranks: `ranks of 2`.
RANKS_PREFIX = "ranks of "


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A port over all layers of a baseline: of a model with prompts and a golden."""

    request: BaselineRequest  # description of the baseline
    port: str  # `planted`, `ranks of N`, or a target as mm2-test names it
    backend: str  # `cpu` or `xla-cpu`
    plant: Plant | None = None  # the mistake in the first, a middle and the last layer; None for a right port
    decodes: bool = False  # whether the last tokens are decoded, and the mistake is limited to them
    asks_name: bool = False  # whether the diagnosis is asked for the name of the middle layer's mistake

    @property
    def rows(self) -> str:
        """`decode` if some tokens are decoded, else `prefill`."""
        return "decode" if self.decodes else "prefill"

    @property
    def num_decoded(self) -> int:
        """Number of tokens of the shortest prompt that are decoded, one by one."""
        return _NUM_DECODE_ROWS if self.decodes else 0

    def __str__(self) -> str:
        return f"{self.request.name}: {self.plant or Path(self.port).name} on {self.backend}, {self.rows}"


def plan_plants(
    request: BaselineRequest, plants: tuple[Plant, ...], *, backend: str, asks_name: bool = False
) -> Iterator[PlannedRun]:
    """Plan a right port, and each plant that can show; the diagnosis may be asked for its name."""
    yield PlannedRun(request=request, port="planted", backend=backend)
    for plant in plants:
        if plant.prefills and may_show(plant, request):
            yield PlannedRun(
                request=request, port="planted", backend=backend, plant=plant, asks_name=asks_name
            )


def plan_decoding(request: BaselineRequest, plants: tuple[Plant, ...]) -> Iterator[PlannedRun]:
    """Plan a right port, and each plant that can be limited to decoded tokens, on the CPU."""
    for plant in (None, *plants):
        if plant is None or (plant.decodes and may_show(plant, request)):
            yield PlannedRun(request=request, port="planted", backend="cpu", plant=plant, decodes=True)


def may_show(plant: Plant, request: BaselineRequest) -> bool:
    """Decide whether a baseline has the padding, the positions and the FP8 weights that a plant needs to show."""
    return (
        (request.padding_side == "left" or not plant.needs_left_padding)
        and (request.has_far_positions or not plant.needs_far_positions)
        and (request.is_fp8 or not plant.needs_fp8)
    )


def carry_out(
    planned: PlannedRun, baseline: Baseline, *, runtime: Runtime, directory: Path
) -> tuple[Case, ...]:
    """Run a port, judge it with all sites and with the output alone, and apply the rules of other tools."""
    capture = _capture(planned, baseline, runtime=runtime, directory=directory)
    with_all_sites = judge_run(baseline, capture)
    by_output = judge_run(baseline, as_black_box(capture))
    # Some layers get the plant; the capture has all.
    planted_layers = _planted_layers(planned, baseline)
    asked_layer = planted_layers[len(planted_layers) // 2] if planned.asks_name else None
    cases = []
    for layer in capture.layers:
        plant = planned.plant if layer in planted_layers else None
        hidden = give_fields(by_output, layer)
        effects = _measure_effects(baseline, layer, plant, planned.num_decoded) if plant else {}
        cases.append(
            Case(
                run=str(planned),
                baseline=planned.request.name,
                port=Path(planned.port).name,
                backend=planned.backend,
                rows=planned.rows,
                layer=layer,
                **(plant.record if plant else {}),
                halves=tuple(tuple(map(str, half.sites)) for half in plant.halves) if plant else (),
                effects={str(site): effect for site, effect in effects.items()},
                **give_fields(with_all_sites, layer),
                black_box_detected=bool(hidden["failed"] or hidden["blamed"]),
                rivals=find_differences(baseline.golden, capture, layer),
                named=name_mistake(baseline, capture, layer) if layer == asked_layer else None,
                akin=plant.akin if plant else (),
                model=planned.request.model_name,
                verdict=str(with_all_sites.verdict),
                black_box_verdict=str(by_output.verdict),
                black_box_excess=max(hidden["excess"].values(), default=0.0),
            )
        )
    return tuple(cases)


def run_port(
    baseline: Baseline, target: Target, *, runtime: Runtime, directory: Path, num_decoded: int = 0
) -> Capture:
    """Run each layer on the golden's input, and decode the last `num_decoded` tokens; `directory` is emptied first."""
    span, graph = Span(0, baseline.spec.num_hidden_layers), baseline.spec.graph
    run = sweep_run(span, sites_level="all", graph=graph).decoding(num_decoded)
    return port_runs.run_port(
        baseline.golden, target, run, reader=baseline.reader, runtime=runtime, directory=directory
    )


def _measure_effects(baseline: Baseline, layer: int, plant: Plant, num_decoded: int) -> dict[Site, float]:
    """Measure the effects of a plant; those of a pair are each mistake's own, at its sites."""
    if not plant.halves:
        return measure_effects(baseline, layer, plant, num_decoded=num_decoded)
    effects: dict[Site, float] = {}
    for half in plant.halves:
        alone = measure_effects(baseline, layer, half, num_decoded=num_decoded)
        effects |= {site: alone[site] for site in half.sites}
    return effects


def _planted_layers(planned: PlannedRun, baseline: Baseline) -> tuple[int, ...]:
    """Return the layers that get the plant; none of a right port."""
    return baseline.layers_with(planned.plant.sites) if planned.plant else ()


def _capture(planned: PlannedRun, baseline: Baseline, *, runtime: Runtime, directory: Path) -> Capture:
    """Run the planned port, of any of its three kinds, and return its capture."""
    if planned.port.startswith(RANKS_PREFIX):
        return port_runs.run_on_ranks(
            "sweep",
            baseline.folder,
            baseline.golden,
            tp_degree=int(planned.port.removeprefix(RANKS_PREFIX)),
            backend=planned.backend,
            directory=directory,
        )
    if planned.port != "planted":
        return run_port(baseline, find_target(planned.port), runtime=runtime, directory=directory)
    layers = frozenset(_planted_layers(planned, baseline))
    port = PlantedPort(plant=planned.plant, layers=layers, decode_only=planned.decodes)
    return run_port(
        baseline, port.target(), runtime=runtime, directory=directory, num_decoded=planned.num_decoded
    )
