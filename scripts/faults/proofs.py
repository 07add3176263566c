"""Proofs of planted mistakes: of the one that the diagnosis names, and of other names, which must not be proved."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import port_runs

from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.undo import Undo, undo_finding
from compare.diagnosis.diagnose import diagnose
from compare.diagnosis.proof import MistakeProof
from compare.sides.golden_weights import CheckpointWeights
from faults.baseline import Baseline
from faults.judging import default_criteria
from faults.plant import Kind, Plant
from faults.port import PlantedLayer, PlantedPort
from minimax_tools.model.run import single_layer_run
from minimax_tools.reference.evaluation import LayerInputs
from minimax_tools.reference.expert_pass import LayerWeights
from neuron.devices.runtime import Runtime
from neuron.ports.target import Target
from neuron.runs.proving import PortProver

# Wrong names for each plant: those that begin where the mistake does are the likeliest to be proved.
_NUM_NEAR, _NUM_FAR = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofCase:
    """A mistake that was undone in a port, and what came of it."""

    plant: str  # the planted mistake
    baseline: str
    undone: str  # the mistake that was undone, as --undo takes it
    kind: str  # `named`: by the diagnosis; `wrong`: another name; `half`: one of two planted mistakes
    is_black_box: bool  # whether the port shows nothing but its output
    proof: MistakeProof

    def __str__(self) -> str:
        shown = ", black box" if self.is_black_box else ""
        way = f" by {self.proof.way}" if self.proof.way else ""
        stage = self.proof.stage
        fit = f", the stage leaves ρ {stage.leaves} of {stage.unexplained}" if stage else ""
        return (
            f"{self.baseline}: {self.plant}{shown}, {self.kind} {self.undone}: {self.proof.outcome}{way}{fit}"
        )


def make_prover(
    baseline: Baseline, target: Target, layer: int, *, runtime: Runtime, directory: Path
) -> PortProver:
    """Build what undoes mistakes in one layer of a port, and judges it again; it writes below `directory`."""
    return PortProver(
        port_runs.request_run(
            baseline.folder,
            baseline.golden,
            target,
            single_layer_run(layer, sites_level="all", graph=baseline.spec.graph),
        ),
        runtime=runtime,
        reader=baseline.reader,
        weights=CheckpointWeights(model=str(baseline.folder)),
        criteria=default_criteria(),
        directory=directory / "proof",
    )


class Proofs:
    """Proofs in the last layer of a port on a baseline."""

    def __init__(
        self,
        plant: Plant,
        baseline: Baseline,
        *,
        runtime: Runtime,
        directory: Path,
        is_black_box: bool = False,
    ) -> None:
        self._plant = plant
        self._baseline = baseline
        self._is_black_box = is_black_box
        self._layer = baseline.request.num_layers - 1
        self._weights = CheckpointWeights(model=str(baseline.folder))
        shutil.rmtree(directory, ignore_errors=True)
        target = _hide_sites(plant, self._layer) if is_black_box else _plant_in(plant, self._layer)
        self._prover = make_prover(baseline, target, self._layer, runtime=runtime, directory=directory)
        self._capture = port_runs.run_port(
            baseline.golden,
            target,
            single_layer_run(self._layer, sites_level="all", graph=baseline.spec.graph),
            reader=baseline.reader,
            runtime=runtime,
            directory=directory / "run",
        )

    def named(self) -> Iterator[ProofCase]:
        """Undo what the diagnosis names first; nothing if it names nothing."""
        finding = next(iter(self._diagnose()), None)
        if finding is not None:
            yield self._case("named", undo_finding(*finding))

    def wrong(self, *, seed: int) -> Iterator[ProofCase]:
        """Undo other mistakes than the planted one, and than those that the diagnosis cannot tell from it."""
        right = {name for name, _ in self._diagnose()} | {self._plant.name, *self._plant.akin}
        with self._weights.open_layer(self._layer, self._baseline.golden) as weights:
            inputs = LayerInputs.of(weights.spec, LayerWeights(weights.tensors), self._baseline.inputs)
            others = _choose_others(self._plant, inputs, right, seed=seed)
        for undo in others:
            yield self._case("wrong", (undo,))

    def halves(self) -> Iterator[ProofCase]:
        """Undo each of two planted mistakes alone."""
        for half in self._plant.halves:
            yield self._case("half", (Undo(half.name, tuple(half.parameters.items())),))

    def _diagnose(self) -> tuple[tuple[str, Any], ...]:
        found = diagnose(
            self._baseline.golden, self._capture, model=self._baseline.folder, layers=(self._layer,)
        )
        return tuple((finding.mistake, dict(finding.parameters)) for finding in found.findings)

    def _case(self, kind: str, undone: tuple[Undo, ...]) -> ProofCase:
        return ProofCase(
            plant=str(self._plant),
            baseline=self._baseline.request.name,
            undone=" + ".join(map(str, undone)),
            kind=kind,
            is_black_box=self._is_black_box,
            proof=self._prover.prove(undone),
        )


def can_be_undone(plant: Plant) -> bool:
    """Decide whether the catalogue has the planted mistake, with all that its parameters say."""
    return plant.kind is Kind.CATALOGUED and plant.prefills and plant.name in CATALOGUE


def _plant_in(plant: Plant, layer: int) -> Target:
    return PlantedPort(plant=plant, layers=frozenset({layer})).target()


def _hide_sites(plant: Plant, layer: int) -> Target:
    """Return the target of the planted port that shows nothing but its output."""
    shown = _plant_in(plant, layer)

    def build(config: Any, layer_idx: int) -> PlantedLayer:
        module = PlantedPort(plant=plant, layers=frozenset({layer}))(config, layer_idx)
        module.sites = {}
        return module

    return replace(shown, factory=build, name=f"{shown.name}, black box")  # type: ignore[call-arg]


def _choose_others(plant: Plant, inputs: LayerInputs, right: set[str], *, seed: int) -> list[Undo]:
    """Choose wrong names with parameters that are tried on this layer: most of them begin at the plant's sites."""
    generator = random.Random(f"{seed} {plant}")
    near: list[Undo] = []
    far: list[Undo] = []
    for mistake in CATALOGUE.values():
        hypotheses = mistake.hypotheses(inputs)
        if mistake.name in right or not hypotheses:
            continue
        hypothesis = generator.choice(hypotheses)
        undo = Undo(mistake.name, tuple(hypothesis.parameters[0].items()))
        (near if hypothesis.sites & set(plant.sites) else far).append(undo)
    generator.shuffle(near)
    generator.shuffle(far)
    return [*near[:_NUM_NEAR], *far[: _NUM_FAR + max(_NUM_NEAR - len(near), 0)]]
